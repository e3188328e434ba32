"""Temporary certificates for one measurement: an authority and a leaf for each side, on P-256."""

from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

LIFETIME = timedelta(days=1)


def write_certificates(folder: Path, names: tuple[str, ...]) -> None:
    """Write `ca.pem`, and for each name `<name>.pem` and `<name>.key`, valid for loopback."""
    authority_key = ec.generate_private_key(ec.SECP256R1())
    authority = _builder("benchmark CA", "benchmark CA", authority_key).add_extension(
        x509.BasicConstraints(ca=True, path_length=0), critical=True
    )
    _write(folder / "ca.pem", authority.sign(authority_key, hashes.SHA256()))
    for name in names:
        key = ec.generate_private_key(ec.SECP256R1())
        hosts = x509.SubjectAlternativeName(
            [x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1"))]
        )
        leaf = _builder(name, "benchmark CA", key).add_extension(hosts, critical=False)
        _write(folder / f"{name}.pem", leaf.sign(authority_key, hashes.SHA256()))
        secret = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        (folder / f"{name}.key").touch(mode=0o600)
        (folder / f"{name}.key").write_bytes(secret)


def _builder(subject: str, issuer: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - LIFETIME)
        .not_valid_after(now + LIFETIME)
    )


def _write(path: Path, certificate: x509.Certificate) -> None:
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

"""Make a certificate authority, and issue certificates for the parties."""

import ipaddress
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.x509.oid import NameOID

from vafl.errors import ConfigError
from vafl.names import SERVER, check_client
from vafl.transport.identity import files, pem
from vafl.transport.identity.names import SERVER_NAME, party_uri
from vafl.transport.identity.usage import usage_of

_AUTHORITY_DAYS = 3650
_CLOCK_SKEW = timedelta(hours=1)  # certificates begin in the past, because other parties' clocks may be slow
_HOST = re.compile(r"(?=.{1,253}$)[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*")


def make_authority(folder: Path, *, overwrite: bool = False) -> None:
    """Create ca.key and ca.pem in a folder of mode 0700. The authority is valid for ten years.

    Args:
        folder: Where to write the files.
        overwrite: Replace an existing authority. All certificates that it has signed become useless.
    """
    if not overwrite:
        files.refuse_taken([folder / "ca.key", folder / "ca.pem"])
    key = ec.generate_private_key(ec.SECP256R1())
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    name = _name(f"vafl authority {identifier.digest.hex()[:16]}")
    certificate = (
        _certificate(name, name, key.public_key(), _AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(identifier, critical=False)
        .sign(key, SHA256())
    )
    files.make_private_folder(folder)
    files.write(folder / "ca.key", pem.key_to_pem(key), files.PRIVATE, overwrite=overwrite)
    files.write(folder / "ca.pem", pem.certificate_to_pem(certificate), files.PUBLIC, overwrite=overwrite)


def issue(
    folder: Path, party: str, *, hosts: Sequence[str] = (), days: int = 825, overwrite: bool = False
) -> Path:
    """Create a party's key and certificate, signed by the authority in `folder`.

    Args:
        folder: The folder of ca.pem and ca.key.
        party: The party's name. `server` gets a certificate for serving, any other name one for dialling.
        hosts: Further DNS names or IP addresses of the server.
        days: For how many days the certificate is valid.
        overwrite: Replace existing files in the party's folder.

    Returns:
        The folder to give to the party, with ca.pem, PARTY.pem and PARTY.key.
    """
    party_folder = folder / (party if party == SERVER else check_client(party))
    if not overwrite:
        refuse_issued(folder, party)
    authority, authority_key = _read_authority(folder)
    key = ec.generate_private_key(ec.SECP256R1())
    issuer_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    certificate = (
        _certificate(_name(party), authority.subject, key.public_key(), _checked_days(days, authority))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([usage_of(party)]), critical=True)
        .add_extension(x509.SubjectAlternativeName(_alternative_names(party, hosts)), critical=False)
        .add_extension(issuer_key, critical=False)
        .sign(authority_key, SHA256())
    )
    files.make_private_folder(party_folder)
    for name, content, mode in (
        (f"{party}.key", pem.key_to_pem(key), files.PRIVATE),
        (f"{party}.pem", pem.certificate_to_pem(certificate), files.PUBLIC),
        ("ca.pem", pem.certificate_to_pem(authority), files.PUBLIC),
    ):
        files.write(party_folder / name, content, mode, overwrite=overwrite)
    return party_folder


def refuse_issued(folder: Path, party: str) -> None:
    """Raise ConfigError if the party's folder has any of the files that `issue` would write."""
    files.refuse_taken(folder / party / name for name in (f"{party}.key", f"{party}.pem", "ca.pem"))


def _read_authority(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    path = folder / "ca.pem"
    certificate = pem.read_certificate(path)
    key = pem.read_key(folder / "ca.key")
    pem.check_authority(certificate, path)
    pem.check_pair(certificate, key, folder / "ca.key")
    pem.check_dates(certificate, path, datetime.now(UTC))
    return certificate, key


def _checked_days(days: int, authority: x509.Certificate) -> int:
    left = (authority.not_valid_after_utc - datetime.now(UTC)).days
    if not 1 <= days <= left:
        raise ConfigError(
            "VFL-6151",
            "a certificate must be valid for 1 day or more, and end before its authority does "
            f"({authority.not_valid_after_utc:%Y-%m-%d}, {left} days left). Found {days} days. Choose "
            "another number of days, or make a new authority in another folder.",
        )
    return days


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + timedelta(days=days))
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _alternative_names(party: str, hosts: Sequence[str]) -> list[x509.GeneralName]:
    if party == SERVER:
        return [party_uri(party), *dict.fromkeys(map(host_name, [SERVER_NAME, *hosts]))]
    if hosts:
        raise ConfigError(
            "VFL-6152",
            "only the server's certificate may have host names, since clients dial only the server. Found "
            f"{', '.join(hosts)} for {party}. Leave them out.",
        )
    return [party_uri(party)]


def host_name(name: str) -> x509.GeneralName:
    """Return a host as an entry of a certificate.

    Raises:
        ConfigError: `name` is neither an IP address nor a DNS name.
    """
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass
    if not _HOST.fullmatch(name.lower()):
        raise ConfigError(
            "VFL-6153",
            f"a host must be a DNS name or an IP address, without a port. Found {name!r}. Correct it.",
        )
    return x509.DNSName(name.lower())

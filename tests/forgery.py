"""Certificates that `issue` would never make, signed by the true authority."""

from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from vafl.transport.identity import Credentials, pem

DIALLING, SERVING = ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH


def forge(folder, party="client-1", *, names=None, usage=(DIALLING,), begin=-2.0, end=2.0):
    """Write a certificate of the authority in `folder`, valid from `begin` to `end` in hours from now."""
    authority, authority_key = pem.read_certificate(folder / "ca.pem"), pem.read_key(folder / "ca.key")
    now, key = datetime.now(UTC), ec.generate_private_key(ec.SECP256R1())
    if names is None:
        names = [x509.UniformResourceIdentifier(f"vafl:party/{party}")]
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, party)]))
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + timedelta(hours=begin))
        .not_valid_after(now + timedelta(hours=end))
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    if usage:
        builder = builder.add_extension(x509.ExtendedKeyUsage(usage), critical=True)
    certificate = pem.certificate_to_pem(builder.sign(authority_key, SHA256()))
    return Credentials(party, pem.certificate_to_pem(authority), certificate, pem.key_to_pem(key))

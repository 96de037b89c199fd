"""HTTPS: the same front over TLS, and the messages about wrong certificates."""

import asyncio
import datetime
import ssl
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from http_rig import GET, post, serving, until

from headrace.data_plane.gateway.http import tls_context
from headrace.errors import ConfigError


def make_certificate(folder: Path, name: str = "server", password: bytes | None = None) -> tuple[str, str]:
    """A self-signed certificate for localhost and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    encryption = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    cert_path, key_path = folder / f"{name}.crt", folder / f"{name}.key"
    cert_path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    key_path.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption))
    return str(cert_path), str(key_path)


@pytest.fixture
def contexts(tmp_path: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    cert, key = make_certificate(tmp_path)
    return tls_context(cert, key), ssl.create_default_context(cafile=cert)


async def test_https_serves_pipelines_large_bodies_and_refusals(contexts):
    """The front does not know that it speaks through TLS. S2"""
    async with serving(*contexts) as rig:
        rig.handler.reply = lambda exchange: (200, b"", [exchange.body])
        client = await rig.connect()
        large = bytes(range(256)) * 8192
        client.send(GET + post(large) + b"nonsense\r\n\r\n")
        first, second, third = [await client.receive() for _ in range(3)]

        assert (first.status, second.status, third.status) == (200, 200, 400)
        assert second.body == large
        assert client.writer.get_extra_info("ssl_object").version() in ("TLSv1.2", "TLSv1.3")


async def test_a_refused_connection_ends_without_half_closing(contexts):
    """TLS has no half-close: the refusal is read off and the sweep ends the connection. F6"""
    async with serving(*contexts) as rig:
        client = await rig.connect()
        client.send(b"nonsense\r\n\r\n")
        assert (await client.receive()).status == 400
        rig.pass_time(3.0)

        assert await client.rest() == b""
        await until(lambda: rig.front.connections == 0)


async def test_a_caller_who_leaves_over_tls_cancels_its_requests(contexts):
    """Disconnection is cancellation over TLS too. X5"""
    async with serving(*contexts) as rig:
        rig.handler.is_holding = True
        client = await rig.connect()
        client.send(GET * 2)
        await until(lambda: len(rig.handler.exchanges) == 2)
        client.writer.transport.abort()
        await until(lambda: rig.front.connections == 0)

        assert rig.handler.abandoned == rig.handler.exchanges


async def test_tls_1_1_is_refused(contexts):
    """TLS 1.2 is the least. S2"""
    server, client = contexts
    client.minimum_version = ssl.TLSVersion.TLSv1_2
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    async with serving(server, client) as rig:
        assert (await (await rig.connect()).ask(GET)).status == 200

    assert server.minimum_version == ssl.TLSVersion.TLSv1_2


async def test_plain_http_on_the_tls_port_disturbs_nobody(contexts):
    """A failed handshake is one connection's matter. F6"""
    reports = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reports.append(context))
    async with serving(*contexts) as rig:
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        writer.write(GET)
        await reader.read()
        writer.close()
        await writer.wait_closed()

        assert (await (await rig.connect()).ask(GET)).status == 200


@pytest.mark.parametrize("wrong", ["missing", "not PEM", "mismatched", "encrypted"])
def test_a_wrong_certificate_is_a_clear_configuration_error(tmp_path, wrong):
    """The message names the setting and the file; OpenSSL never asks for a passphrase on the terminal. S2"""
    cert, key = make_certificate(tmp_path)
    if wrong == "missing":
        cert, key = str(tmp_path / "no.crt"), str(tmp_path / "no.key")
    elif wrong == "not PEM":
        Path(cert).write_text("hello")
    elif wrong == "mismatched":
        _, key = make_certificate(tmp_path, "other")
    else:
        cert, key = make_certificate(tmp_path, "encrypted", b"secret")

    with pytest.raises(ConfigError) as caught:
        tls_context(cert, key)

    assert len(caught.value.problems) == (2 if wrong == "missing" else 1)
    assert "tls_key" in str(caught.value)
    assert key in str(caught.value)

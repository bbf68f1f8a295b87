"""Why a process has no page, in words that are all ours.

What it sent, and what it is said to be called, is on a page that people believe: none of it is
repeated here.
"""

from __future__ import annotations

import os
import ssl
from socket import gaierror

import aiohttp


def why(error: Exception) -> str:
    """What became of a request: "cannot be reached: Connection refused"."""
    if isinstance(error, aiohttp.InvalidURL):
        return "is no address: expected http://HOST:PORT"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return f"cannot be reached: TLS: {_distrust(error.certificate_error)}"
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"cannot be reached: {_broken(error.os_error)}"
    if isinstance(error, OSError):
        return f"cannot be reached: {_broken(error)}"
    if isinstance(error, aiohttp.ClientError):
        return f"does not speak HTTP ({type(error).__name__})"
    return f"cannot be asked ({type(error).__name__})"


def names_another(error: Exception) -> bool:
    """Of a certificate that is refused: it is for another host."""
    return getattr(error, "verify_code", None) in _HOSTNAME_MISMATCH


_HOSTNAME_MISMATCH = (62, 64)  # X509_V_ERR_HOSTNAME_MISMATCH and _IP_ADDRESS_MISMATCH of OpenSSL


def _distrust(error: Exception) -> str:
    if names_another(error):  # OpenSSL's own text has the name in it
        return "its certificate is for another host"
    return str(getattr(error, "verify_message", "its certificate is not believed"))


def _broken(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return f"TLS: {(error.reason or 'handshake failed').replace('_', ' ').lower()}"
    if isinstance(error, gaierror):
        return "no such host"
    return os.strerror(error.errno) if error.errno else "connection lost"

"""What stores raise: which of it passes by itself, and how it is said without a secret."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Final

from dl2gpu.trace.inputs import InputError

__all__ = [
    "EXTRAS",
    "ChangedError",
    "TruncatedError",
    "check_no_secret",
    "gave_up",
    "masked",
    "remote_errors",
    "said",
    "transient",
]

EXTRAS: Final[dict[str, str]] = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gs",
    "gcs": "gs",
    "az": "az",
    "abfs": "az",
    "abfss": "az",
    "adl": "az",
    "http": "http",
    "https": "http",
}
"""The extra of dl2gpu that brings what a scheme needs."""

CREDENTIALS: Final[dict[str, str]] = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or the machine's role",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or the machine's service account",
    "az": "AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY or _SAS_TOKEN, or an identity",
    "http": "DL2GPU_HTTP_AUTHORIZATION",
}
"""Where the credentials of each kind of store come from, for messages."""


class TruncatedError(Exception):
    """A body ended before its length: the rest is asked for."""


class ChangedError(Exception):
    """An object is not the one that was listed."""


# --------------------------------------------------------------------------------------------------
# What passes

_PASSING_STATUS: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
_PASSING_CODES: Final = frozenset(
    {
        "InternalError", "OperationAborted", "RequestTimeout", "RequestTimeTooSkewed",
        "ServerBusy", "ServiceUnavailable", "SlowDown", "Throttling", "ThrottlingException",
    }
)  # fmt: skip
_PASSING: Final = frozenset(
    {
        # aiohttp
        "ClientConnectionError", "ClientPayloadError", "ServerDisconnectedError",
        "TransferEncodingError",
        # botocore
        "HTTPClientError", "IncompleteReadError", "ResponseStreamingError",
        "ResponseParserError",
        # azure.core
        "ServiceRequestError", "ServiceResponseError", "IncompleteRead",
        # requests, urllib3, fsspec
        "ChunkedEncodingError", "ProtocolError", "FSTimeoutError",
    }
)  # fmt: skip
_LASTING: Final = frozenset(
    {"ClientConnectorDNSError", "ClientConnectorCertificateError", "ClientConnectorSSLError",
     "ClientSSLError", "SSLError", "InvalidURL", "ProxyConnectionError"}
)  # fmt: skip


def transient(error: BaseException) -> bool:
    """May the same request succeed a little later? By type and status, whatever the store."""
    seen = 0
    one: BaseException | None = error
    while one is not None and seen < 8:
        names = {c.__name__ for c in type(one).__mro__}
        status = _status(one)
        if status is not None and status >= 400:
            return status in _PASSING_STATUS or _code(one) in _PASSING_CODES
        if names & _LASTING:
            return False
        if names & _PASSING or isinstance(one, TruncatedError | ConnectionError | TimeoutError):
            return True
        one = one.__cause__ or one.__context__
        seen += 1
    return False


def _status(error: BaseException) -> int | None:
    """The HTTP status that an error of a store carries."""
    answer = getattr(error, "response", None)  # botocore
    if isinstance(answer, dict):
        status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return status if isinstance(status, int) else None
    for name in ("status", "status_code", "code"):  # aiohttp, azure, gcsfs
        status = getattr(error, name, None)
        if isinstance(status, int) or (isinstance(status, str) and status.isdecimal()):
            return int(status)
    return None


def _code(error: BaseException) -> str:
    answer = getattr(error, "response", None)
    if isinstance(answer, dict):
        return str(answer.get("Error", {}).get("Code", ""))
    return ""


def status_of(error: BaseException) -> int | None:
    """The HTTP status that an error, or what it came of, carries."""
    one: BaseException | None = error
    for _ in range(8):
        if one is None:
            break
        status = _status(one)
        if status is not None:
            return status
        one = one.__cause__ or one.__context__
    return None


# --------------------------------------------------------------------------------------------------
# Secrets

_SECRET_NAMES: Final = re.compile(
    r"(?i)(?:^|[-_.])(?:signature|sig|token|secret|password|passwd|pwd|key|api-?key|credential"
    r"|auth|authorization|accesskeyid|awsaccesskeyid|googleaccessid)$"
)
_SECRET_VARIABLES: Final = re.compile(
    r"(?i)(secret|password|token|account_?key|connection_?string|authorization|access_?key)"
)
_USER: Final = re.compile(r"(?<=://)[^/\s?#@]*(?:%40|@)(?=[^/\s]*)")
_QUERY: Final = re.compile(r"(?<=[?&;])([^=&#\s'\"]+)=[^&#\s'\"]+")


def masked(text: str) -> str:
    """``text`` with what may be secret in the URLs that it holds, and known secrets, as ``***``."""
    if "://" in text or "?" in text:
        text = _USER.sub("***@", text)
        text = _QUERY.sub(r"\1=***", text)
    for name, value in os.environ.items():
        if len(value) >= 8 and value in text and _SECRET_VARIABLES.search(name):
            text = text.replace(value, "***")
    return text


def check_no_secret(url: str) -> None:
    """Refuses a URL that carries credentials: it would be in histories, logs and process lists.

    Raises:
        InputError: it does; names where they belong.
    """
    for one in url.split("::"):
        scheme, separator, rest = one.partition("://")
        if not separator:
            continue
        authority, *_ = re.split(r"[/?#]", rest, maxsplit=1)
        query = rest.partition("?")[2].partition("#")[0]
        user, at, _ = authority.rpartition("@")
        # abfs://container@account.dfs.core.windows.net is a name, not a secret
        named = scheme in ("abfs", "abfss", "az") and ":" not in user
        names = [part.partition("=")[0] for part in re.split("[&;]", query)]
        if (at and not named) or any(_SECRET_NAMES.search(name) for name in names):
            where = CREDENTIALS.get(EXTRAS.get(scheme, ""), "the store's environment variables")
            raise InputError(
                f"{masked(url)}: expected a URL without credentials, found some in it; they are "
                f"taken from the environment only: {where}"
            )


# --------------------------------------------------------------------------------------------------
# Words

_GAVE_UP: Final = "gave up after"


def gave_up(reason: str) -> bool:
    """Does a file's reason say that a store did not answer? Another scan may read the file."""
    return _GAVE_UP in reason


def said(error: BaseException, tries: int = 1) -> str:
    """What went wrong, in a line, without secrets."""
    if isinstance(error, InputError):
        return str(error)
    if isinstance(error, ImportError):
        return f"needs a package that is not installed: {masked(str(error))}"
    if isinstance(error, FileNotFoundError):
        return "cannot be read: it is not there (any more)"
    words = " ".join(masked(str(error)).split())[:300]
    told = f"{type(error).__name__}: {words}" if words else type(error).__name__
    if isinstance(error, ChangedError):
        return str(error)
    if isinstance(error, PermissionError) or status_of(error) in {401, 403}:
        return f"may not be read: {told}"
    if transient(error):
        return f"cannot be read: {_GAVE_UP} {tries} tries: {told}"
    return f"cannot be read: {told}"


@contextlib.contextmanager
def remote_errors(url: str | None = None, tries: int = 1) -> Iterator[None]:
    """What a store raises, as InputError; the message begins with ``url`` where one is given."""
    where = f"{masked(url)}: " if url else ""
    try:
        yield
    except InputError:
        raise
    except ImportError as e:
        extra = EXTRAS.get((url or "").rpartition("::")[2].partition("://")[0])
        if extra is None:
            raise InputError(f"{where}{said(e)}") from None
        raise InputError(
            f"{where}reading it needs the extra {extra}, found it not installed: "
            f"pip install 'dl2gpu[{extra}]'"
        ) from None
    except Exception as e:  # noqa: BLE001 - every store has its own exceptions
        raise InputError(f"{where}{said(e, tries)}") from None

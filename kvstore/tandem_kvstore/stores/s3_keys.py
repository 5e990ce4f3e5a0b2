"""The keys of an S3 store: where they are, and whether they have changed.

    the settings' keys, or a mounted Secret      given for this store
    environment, web identity                    obstore reads them
    shared file of AWS's tools                   read here: obstore does not know it
    container, instance                          obstore asks for them

The first place that has keys counts, as with AWS's tools. boto3 has the same chain, but its session
reads the shared file only once, so changed keys would need a restart. No error quotes the contents
of a file.
"""

import configparser
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ..errors import LocationError
from ..location import Secret, StoreCredentials

if TYPE_CHECKING:
    from obstore.store import S3Credential

_SECRET_FILES: Final = ("access_key", "secret_key", "session_token")
_PROFILE_FIELDS: Final = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
_SHARED_FILE: Final = "AWS_SHARED_CREDENTIALS_FILE"
_PROFILE: Final = "AWS_PROFILE"
_BEFORE_SHARED: Final = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE")
"""Variables of the places that come before the shared file."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys that sign requests."""

    access_key: Secret
    secret_key: Secret
    token: Secret
    """Session token; empty: none."""

    def credential(self) -> "S3Credential":
        """The keys in obstore's form. They do not expire: a changed file makes a new client."""
        return {
            "access_key_id": self.access_key.reveal(),
            "secret_access_key": self.secret_key.reveal(),
            "token": self.token.reveal() or None,
            "expires_at": None,
        }


@dataclass(frozen=True, slots=True)
class KeyFiles:
    """Keys in files that may be replaced at any time."""

    paths: tuple[Path, ...]
    read: Callable[[], Keys]
    """Reads the keys. Raises LocationError, which names only the file and the field."""

    def stamp(self) -> object:
        """A value that changes when a file is written, or when the kubelet replaces its link."""
        stamps = []
        for path in self.paths:
            try:
                status = path.stat()
                stamps.append((status.st_mtime_ns, status.st_ino, status.st_size))
            except OSError:
                stamps.append((0, 0, 0))
        return tuple(stamps)


def key_files(
    credentials: StoreCredentials | None, environment: Mapping[str, str]
) -> KeyFiles | None:
    """The files that have the keys. None: `credentials` has them, or obstore finds them.

    Raises LocationError if the environment names a shared file or a profile without keys.
    """
    if credentials is not None and (directory := credentials.directory) is not None:
        paths = tuple(directory / name for name in _SECRET_FILES)
        return KeyFiles(paths, partial(_read_secret, *paths))
    if credentials is not None and credentials.access_key:
        return None
    if any(environment.get(name) for name in _BEFORE_SHARED):
        return None
    return _shared_file(environment)


def _shared_file(environment: Mapping[str, str]) -> KeyFiles | None:
    named, profile = environment.get(_SHARED_FILE), environment.get(_PROFILE)
    try:
        file = Path(named or "~/.aws/credentials").expanduser()
    except RuntimeError:
        # This user has no home directory.
        file = Path("/.aws/credentials")
    files = KeyFiles((file,), partial(_read_profile, file, profile or "default"))
    if not (named or profile):
        # No variable names the file, so it is used only if it can be read and has keys.
        is_readable = os.access(file, os.R_OK)
        if not is_readable or "aws_access_key_id" not in _fields(file, "default"):
            return None
    files.read()
    return files


def _read_secret(access_key: Path, secret_key: Path, token: Path) -> Keys:
    has_token = token.exists()
    return Keys(_text(access_key), _text(secret_key), _text(token) if has_token else Secret(""))


def _text(file: Path) -> Secret:
    try:
        return Secret(file.read_text(encoding="utf-8").strip())
    except (OSError, UnicodeDecodeError):
        # Not chained: the error of a wrong encoding quotes the bytes.
        raise LocationError(f"credentials: {file} cannot be read") from None


def _read_profile(file: Path, profile: str) -> Keys:
    if not os.access(file, os.R_OK):
        raise LocationError(
            f"credentials: {file} does not exist or may not be read: write it, or correct"
            f" {_SHARED_FILE} or {_PROFILE}"
        )
    fields = _fields(file, profile)
    access_key, secret_key, token = (Secret(fields.get(name, "")) for name in _PROFILE_FIELDS)
    if not (access_key and secret_key):
        raise LocationError(
            f"credentials: profile {profile!r} of {file} lacks {_PROFILE_FIELDS[0]} or"
            f" {_PROFILE_FIELDS[1]}: a profile's role, SSO and credential_process are not supported"
        )
    return Keys(access_key, secret_key, token)


def _fields(file: Path, profile: str) -> Mapping[str, str]:
    """The fields of a profile; empty if the file or the profile does not exist."""
    # In these files a section DEFAULT is a profile like others, and `%` is an ordinary character.
    parser = configparser.RawConfigParser(default_section="", strict=False)
    try:
        parser.read_string(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, UnicodeDecodeError, configparser.Error):
        # Not chained: the parser's errors quote lines.
        raise LocationError(
            f"credentials: {file} cannot be read as a file of profiles: [NAME], then lines of"
            " FIELD = VALUE"
        ) from None
    return parser[profile] if parser.has_section(profile) else {}

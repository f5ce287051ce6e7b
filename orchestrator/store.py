"""A folder of objects in an object store: listed, read and written whole, created exclusively.

Object stores have neither appending nor renaming nor locks. What they have, and what is used here,
is that an object is there whole or not at all, and that one can be created only if it is not there
(`If-None-Match`), which decides between two machines that try.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from orchestrator.errors import ConfigError, LedgerError

SCHEMES = ("s3", "file")
"""Kinds of stores in which exclusive creation has been tried."""


class StoreError(LedgerError):
    """The store cannot be reached or used now."""


class Store:
    """The objects below one URI; paths are relative to it.

    Methods raise `StoreError` where the store cannot be used.

    Attributes:
        uri: where it is.
    """

    def __init__(self, uri: str) -> None:
        """Connect to nothing yet.

        Raises:
            ConfigError: a URI of another kind, with credentials in it, or a package that is absent.
        """
        parts = urlsplit(uri)
        if "@" in parts.netloc:
            raise ConfigError(
                "--store holds credentials; leave them out of the URI and give them as your other "
                "S3 tools get them, for example by AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            )
        if parts.scheme not in SCHEMES or not (parts.netloc or parts.scheme == "file"):
            raise ConfigError(
                f"--store {uri}: no such kind of store; give s3://BUCKET/PREFIX, or "
                "file:///FOLDER for a folder that machines share"
            )
        self.uri = uri
        self._files, self._base, self._errors = _opened(uri, parts.scheme)

    def versions(self) -> dict[str, str]:
        """Every object, by path; the text changes when the object does."""
        with self._reaching():
            found = self._files.find(self._base, detail=True)
        return {path[len(self._base) + 1 :]: _version(info) for path, info in found.items()}

    def names(self, folder: str) -> list[str]:
        """Names of the objects right below a folder, sorted; none where there is no such folder."""
        with self._reaching():
            found = self._files.find(self._at(folder), maxdepth=1)
        return sorted(path.rpartition("/")[2] for path in found)

    def version(self, path: str) -> str:
        """The version of one object."""
        with self._reaching():
            return _version(self._files.info(self._at(path)))

    def read(self, path: str) -> bytes:
        """A whole object."""
        with self._reaching():
            return bytes(self._files.cat_file(self._at(path)))

    def write(self, path: str, data: bytes) -> None:
        """Replace or make an object."""
        with self._reaching():
            self._files.pipe_file(self._at(path), data)

    def create(self, path: str, data: bytes) -> bool:
        """Make an object if there is none; whether there was none."""
        try:
            with self._reaching():
                self._files.pipe_file(self._at(path), data, mode="create")
        except FileExistsError:
            return False
        return True

    def upload(self, source: Path, path: str) -> None:
        """Replace or make an object by a file, in parts if it is large."""
        with self._reaching():
            self._files.put_file(str(source), self._at(path))

    def download(self, path: str, target: Path) -> None:
        """Write an object to a file."""
        with self._reaching():
            self._files.get_file(self._at(path), str(target))

    def remove(self, path: str) -> None:
        """Remove an object; one that is not there is fine."""
        try:
            with self._reaching():
                self._files.rm_file(self._at(path))
        except FileNotFoundError:
            return

    def _at(self, path: str) -> str:
        return f"{self._base}/{path}"

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        """What the store's packages raise, as `StoreError`; objects that are (not) there aside."""
        try:
            yield
        except FileExistsError:
            raise
        except self._errors as error:
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise StoreError(f"the store {self.uri} cannot be used ({first[:300]})") from error


def _opened(uri: str, scheme: str) -> tuple[Any, str, tuple[type[Exception], ...]]:
    """A file system, the path of the URI in it, and what it raises where it cannot be used."""
    errors: tuple[type[Exception], ...] = (OSError,)
    try:  # packages of an extra, which most roots do without
        from fsspec.core import url_to_fs  # noqa: PLC0415

        if scheme == "s3":
            errors += _s3_errors()
    except ImportError as error:
        raise ConfigError(
            f"--store {uri} needs the package {error.name}: pip install 'seedfront[s3]'"
        ) from None
    # Listings must be as new as the question: another machine writes as well.
    options = {"use_listings_cache": False} if scheme == "s3" else {"auto_mkdir": True}
    files, base = url_to_fs(uri, skip_instance_cache=True, **options)
    return files, str(base).rstrip("/"), errors


def _s3_errors() -> tuple[type[Exception], ...]:
    import s3fs  # noqa: F401, PLC0415 - looked for here, as fsspec would name it much later
    from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415

    return BotoCoreError, ClientError


def _version(info: dict[str, Any]) -> str:
    """What changes with an object: its ETag, or size and time of a file."""
    return str(info.get("ETag") or f"{info['size']}-{info['mtime']}")

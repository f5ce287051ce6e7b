"""Where the MLflow view goes, and how addresses are written down without their secrets.

Apart from `tracking`, since importing MLflow takes long.
"""

import re
from pathlib import Path
from urllib.parse import urlsplit

from orchestrator.errors import ConfigError

UI_PORT = 5000
"""Where `ui` serves the embedded store unless told otherwise."""


def tracking_uri(asked: str | None, root: Path) -> str:
    """The absolute URI of the store; relative SQLite paths start from the root.

    A password that `without_secret` took out stays out: the packages behind the URI then take it
    from their own places, as MLFLOW_TRACKING_PASSWORD and PGPASSWORD.

    Raises:
        ConfigError: a file store, which MLflow refuses, or a scheme that it does not know.
    """
    if asked is None:
        return f"sqlite:///{root / 'mlflow.db'}"
    asked = asked.replace(f":{HIDDEN}@", "@")
    scheme = urlsplit(asked).scheme
    if scheme in ("", "file"):
        raise ConfigError(
            f"tracking.uri={asked}: MLflow no longer takes a folder; use sqlite:///PATH.db, and "
            "bring old runs along with `mlflow migrate-filestore --source FOLDER --target "
            "sqlite:///PATH.db`"
        )
    if scheme == "sqlite":
        path = asked.removeprefix("sqlite:///")
        return f"sqlite:///{(root / path).resolve()}"
    if scheme not in ("http", "https", "postgresql", "mysql", "mssql"):
        raise ConfigError(
            f"tracking.uri={without_secret(asked)}: unknown scheme {scheme}; use sqlite, http, "
            "https or a database URI"
        )
    return asked


def ui_address(uri: str) -> str:
    """Where a store's runs are seen: at a tracking server itself, else where `ui` serves them."""
    parts = urlsplit(uri)
    if parts.scheme in ("http", "https"):
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/')}"
    return f"http://127.0.0.1:{UI_PORT}"


HIDDEN = "***"
"""What stands in the place of a password."""

PASSWORD = re.compile(r"(://[^\s:/@]*):[^\s/]*@")
"""The password of a URI, in any text; it may hold `@` itself, as people write it."""


WEBHOOK = re.compile(r"""(webhook["']?\s*[:=]\s*["']?)(https?://\S+)""", re.IGNORECASE)
"""A webhook with its key, as a command line, a sweep file or a diff has it, to the next space."""


def without_secret(text: str) -> str:
    """A URI, or any text with URIs in it, without the passwords and webhooks that they carry."""
    text = WEBHOOK.sub(lambda found: found[1] + without_path(found[2]), text)
    return PASSWORD.sub(rf"\1:{HIDDEN}@", text)


def without_path(url: str) -> str:
    """Scheme and host of a webhook: whoever knows the rest can write to it."""
    scheme, _, rest = url.partition("://")
    host = re.split(r"[/?#]", rest, maxsplit=1)[0].rpartition("@")[2]
    return f"{scheme}://{host}/***"

"""One small message to a URL when a sweep ends, for whoever waits for it elsewhere.

A receiver that is away, slow or unwilling costs a few seconds and a line of warning, never a sweep.
"""

import base64
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException, HTTPMessage
from typing import IO, Any
from urllib.parse import unquote, urlsplit, urlunsplit

TIMEOUT_SECONDS = 5.0
"""How long the receiver may take, names of hosts looked up and all."""


def message(
    sweep: str,
    outcome: str,
    counts: Mapping[str, int],
    *,
    wall_seconds: float,
    host: str,
    mlflow_url: str | None,
) -> dict[str, Any]:
    """What is sent; `text` says the same in a sentence, as chat services show it.

    Args:
        sweep: its name.
        outcome: how it ended.
        counts: desired replicates by status.
        wall_seconds: of the call that ended.
        host: that it ran on.
        mlflow_url: of the sweep's run; None where no server shows it.
    """
    said = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    return {
        "text": f"{sweep} on {host}: {outcome} ({said})",
        "sweep": sweep,
        "outcome": outcome,
        "counts": dict(counts),
        "wall_seconds": round(wall_seconds, 1),
        "host": host,
        "mlflow_url": mlflow_url,
    }


def post(url: str, body: Mapping[str, Any], timeout_seconds: float = TIMEOUT_SECONDS) -> str | None:
    """POST a JSON object; returns why it did not arrive, or None where it did.

    Args:
        url: http or https; a name and password in it are sent as basic authentication.
        body: JSON-ready.
        timeout_seconds: after which the receiver is given up.
    """
    problems: list[str | None] = []
    # A socket's own timeout counts neither looking up a name nor an answer that trickles in.
    sender = threading.Thread(
        target=lambda: problems.append(_problem(url, body, timeout_seconds)), daemon=True
    )
    sender.start()
    sender.join(timeout_seconds)
    return problems[0] if problems else f"no answer within {timeout_seconds:g} s"


def _problem(url: str, body: Mapping[str, Any], timeout_seconds: float) -> str | None:
    """POST; the reasons that are returned hold nothing of the URL, whose path may be a secret."""
    try:
        with _OPENER.open(_request(url, body), timeout=timeout_seconds):
            return None
    except urllib.error.HTTPError as error:
        error.close()
        return f"the answer was {error.code} {error.reason}"
    except urllib.error.URLError as error:
        return getattr(error.reason, "strerror", None) or type(error.reason).__name__
    except (OSError, HTTPException) as error:
        return type(error).__name__


def _request(url: str, body: Mapping[str, Any]) -> urllib.request.Request:
    parts = urlsplit(url)
    user, _, host = parts.netloc.rpartition("@")
    headers = {"Content-Type": "application/json", "User-Agent": "seedfront"}
    if user:
        headers["Authorization"] = f"Basic {base64.b64encode(unquote(user).encode()).decode()}"
    return urllib.request.Request(
        urlunsplit(parts._replace(netloc=host, fragment="")),
        data=json.dumps(body).encode(),
        headers=headers,
        method="POST",
    )


class _Unredirected(urllib.request.HTTPRedirectHandler):
    """A redirect would turn the POST into a GET, or lead to another host; it is a refusal."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: HTTPMessage,
        newurl: str,
    ) -> None:
        return None


_OPENER = urllib.request.build_opener(_Unredirected)

"""The end of a sweep is told once, to http(s) alone, at no risk to the sweep, and keeps secrets."""

import errno
import json
import threading
import time
from contextlib import contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from orchestrator import driver as driving
from orchestrator import tracking, webhook
from orchestrator.compose import load_sweep
from orchestrator.data.preparation import prepare
from orchestrator.driver import spec_json
from orchestrator.errors import ConfigError
from orchestrator.plan import make_plan
from orchestrator.progress import SweepStoppedError
from orchestrator.provenance import capture
from orchestrator.store_uri import without_secret

SECRET = "T0/B0/hunter2"


class _Receiver(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.got.append((self.path, dict(self.headers), json.loads(body)))
        self.server.may_answer.wait(5)
        self.send_response(self.server.status)
        self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self):
        self.do_POST()

    def log_message(self, *arguments):
        pass


@contextmanager
def receiving(status=200):
    """A server on this machine that remembers what it got."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Receiver)
    server.got, server.status, server.may_answer = [], status, threading.Event()
    server.may_answer.set()
    server.place = f"127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.may_answer.set()
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_message_arrives_whole_and_with_its_credentials_out_of_the_url():
    body = webhook.message(
        "small", "done", {"failed": 1, "completed": 3}, wall_seconds=61.26, host="box",
        mlflow_url=None,
    )  # fmt: skip
    with receiving(204) as server:
        assert webhook.post(f"http://me:p%40ss@{server.place}/{SECRET}?key=1", body) is None
        ((path, headers, got),) = server.got
    assert path == f"/{SECRET}?key=1"
    assert headers["Host"] == server.place
    assert headers["Authorization"] == "Basic bWU6cEBzcw=="
    assert headers["Content-Type"] == "application/json"
    assert got == {
        "text": "small on box: done (3 completed, 1 failed)",
        "sweep": "small",
        "outcome": "done",
        "counts": {"failed": 1, "completed": 3},
        "wall_seconds": 61.3,
        "host": "box",
        "mlflow_url": None,
    }


@pytest.mark.parametrize("status", [302, 307, 404, 500])
def test_any_answer_but_success_is_said_and_no_redirect_is_followed(status):
    with receiving(status) as server:
        problem = webhook.post(f"http://{server.place}/{SECRET}", {})
        assert len(server.got) == 1
    assert str(status) in problem
    assert SECRET not in problem


def test_a_receiver_that_does_not_answer_is_given_up():
    with receiving() as server:
        server.may_answer.clear()
        began = time.monotonic()
        problem = webhook.post(f"http://{server.place}/", {}, timeout_seconds=0.2)
        assert time.monotonic() - began < 2
    assert "0.2 s" in problem or "TimeoutError" in problem


def test_a_receiver_that_is_not_there_is_said():
    with receiving() as server:
        place = server.place
    assert webhook.post(f"http://{place}/{SECRET}", {}) == "Connection refused"


SWEEP = """
name: small
base:
  size: nano
  data: files
  data.sources: [text.jsonl]
  data.vocab_size: 300
  budget.tokens: 1280
  batch.tokens: 128
  seq_len: 64
"""


@pytest.fixture
def load(tmp_path):
    def run(*overrides):
        (tmp_path / "small.yaml").write_text(SWEEP)
        return load_sweep("small.yaml", list(overrides), tmp_path)

    return run


@pytest.mark.parametrize(
    "url",
    [
        f"ftp://host/{SECRET}",
        f"file:///{SECRET}",
        f"host/{SECRET}",
        f"https:///{SECRET}",
        f"https://host:port/{SECRET}",
        f"https://host/{SECRET} x",
        f"https://höst/{SECRET}",
    ],
)
def test_what_is_no_web_address_is_refused_without_showing_it(load, url):
    with pytest.raises(ConfigError, match=r"notify\.webhook must be a URL like") as caught:
        load(f"notify.webhook='{url}'")
    assert SECRET not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_webhook_changes_no_id_and_its_secret_is_in_nothing_that_is_written(load, tmp_path):
    rows = [json.dumps({"text": " ".join(f"w{n % 97}" for n in range(200))})] * 50
    (tmp_path / "text.jsonl").write_text("\n".join(rows))
    override = f"notify.webhook='https://me:hunter2@host:8/{SECRET}?token=hunter2'"
    sweep = load(override)
    assert [cell.cell_id for cell in sweep.cells] == [cell.cell_id for cell in load().cells]
    plan = make_plan(sweep, tmp_path / "runs", tmp_path)
    prepare(plan.data, plan.root)
    provenance = capture(["python", "-m", "orchestrator", "sweep", override])
    spec = spec_json(make_plan(sweep, plan.root, tmp_path), provenance)
    assert "hunter2" not in json.dumps(spec)
    assert spec["notify"] == {"webhook": "https://host:8/***"}
    assert spec["overrides"][0].startswith("notify.webhook='https://host:8/***")


@pytest.mark.parametrize(
    "line",
    [
        f"+notify: {{webhook: https://host/{SECRET}}}",
        f'-  webhook:   "https://me@host/{SECRET}"',
        f"notify.webhook=https://host?{SECRET}",
    ],
)
def test_text_with_a_webhook_is_shown_with_its_host_alone(line):
    shown = without_secret(line)
    assert "hunter2" not in shown
    assert "https://host/***" in shown


def test_an_override_that_cannot_be_read_is_refused_without_its_secret(load):
    with pytest.raises(ConfigError, match="override") as caught:
        load(f"notify.webhook=https://host/{SECRET}?a=b")
    assert SECRET not in str(caught.value)


def _raises(error):
    def run(*arguments):
        if error is not None:
            raise error

    return run


@pytest.mark.parametrize(
    ("error", "holder", "outcome"),
    [
        (None, None, "done"),
        (SweepStoppedError("alike"), None, "stopped_by_bugs"),
        (KeyboardInterrupt(), None, "interrupted"),
        (OSError(errno.ENOSPC, "No space left on device"), None, "stopped_by_storage"),
        (KeyboardInterrupt(), "another host", None),
    ],
    ids=["done", "bugs", "interrupted", "storage", "taken over"],
)
def test_each_way_to_end_has_its_word(monkeypatch, error, holder, outcome):
    monkeypatch.setattr(driving, "preparing", lambda plan, console: nullcontext())
    call = SimpleNamespace(
        plan=SimpleNamespace(root="runs", states={}),
        run=_raises(error),
        conclude=lambda: None,
        wind_up=lambda status: None,
        outcome=None,
    )
    console = SimpleNamespace(print=lambda text, **options: None)
    driving._reconcile(call, console, SimpleNamespace(lost_to=holder), "sqlite:///x")
    assert call.outcome == outcome


@pytest.fixture
def call(load, tmp_path):
    """A call whose sweep has ended, and what it says."""

    def make(url, outcome):
        plan = make_plan(load(f"notify.webhook='{url}'"), tmp_path / "runs", tmp_path)
        said = []
        console = SimpleNamespace(print=lambda text, **options: said.append(text))
        made = driving._Call(plan, None, console, is_price_overruled=False)
        made.outcome = outcome
        return made, said

    return make


def test_the_end_is_told_with_the_counts_of_the_ledger(call):
    with receiving() as server:
        ended, said = call(f"http://{server.place}/{SECRET}", "interrupted")
        ended.tell_end()
        ((_, _, body),) = server.got
    assert (body["sweep"], body["outcome"], body["counts"]) == (
        "small",
        "interrupted",
        {"pending": 1},
    )
    assert body["mlflow_url"] is None
    assert said == []


def test_a_sweep_that_goes_on_elsewhere_tells_nobody(call):
    with receiving() as server:
        ended, _ = call(f"http://{server.place}/", None)
        ended.tell_end()
        assert server.got == []


def test_a_failure_is_one_line_without_the_secret(call):
    with receiving(500) as server:
        ended, said = call(f"http://{server.place}/{SECRET}", "done")
        ended.tell_end()
    (line,) = said
    assert f"http://{server.place}/***" in line
    assert "500" in line
    assert SECRET not in line


def test_only_a_tracking_server_has_an_address_to_send(monkeypatch, tmp_path):
    monkeypatch.setattr(tracking, "_connect", lambda uri: None)
    monkeypatch.setattr(tracking.MlflowView, "_ensure_experiment", lambda view, root: "7")
    pages = []
    for uri in ("https://me:hunter2@host/mlflow/", f"sqlite:///{tmp_path}/mlflow.db"):
        view = tracking.MlflowView(uri, tmp_path, "small")
        assert view.page is None
        view._parent = "run"
        pages.append(view.page)
    assert pages == ["https://host/mlflow/#/experiments/7/runs/run", None]


def test_a_sweep_is_told_of_once_its_call_has_ended(call, monkeypatch):
    def end(call, console, lease, uri):
        call.outcome = "done"
        return 3

    monkeypatch.setattr(driving, "_reconcile", end)
    with receiving() as server:
        made, said = call(f"http://{server.place}/", None)
        assert driving.reconcile(made.plan, None, made._console) == 3
        ((_, _, body),) = server.got
    assert body["outcome"] == "done"
    assert said == []


@pytest.mark.ray
@pytest.mark.slow
def test_a_sweep_that_is_done_says_so_once(fake):
    fake.write([1e-3], [0])
    with receiving() as server:
        assert fake.run(f"notify.webhook=http://{server.place}/{SECRET}") == 0, fake.said
        ((path, _, body),) = server.got
        assert fake.run(f"notify.webhook=http://{server.place}/{SECRET}") == 0, fake.said
        assert len(server.got) == 1
    assert path == f"/{SECRET}"
    assert (body["outcome"], body["counts"]) == ("done", {"completed": 1})
    assert body["wall_seconds"] > 0
    written = [p for p in fake.sweep.rglob("*") if p.is_file() and p.suffix != ".parquet"]
    assert written
    assert [p for p in written if SECRET.encode() in p.read_bytes()] == []

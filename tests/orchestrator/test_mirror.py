"""A sweep's copy in a store: nothing that was journalled is lost, whichever machine goes on."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
from rich.console import Console

from orchestrator import store as store_module
from orchestrator import store_lease
from orchestrator.cli import main
from orchestrator.errors import ConfigError, LedgerError
from orchestrator.journal import opening
from orchestrator.leases import process_facts
from orchestrator.mirror import STATE, Mirror, kept_in_store
from orchestrator.store import Store, StoreError
from orchestrator.store_lease import StoreLease


@pytest.fixture
def uri(tmp_path):
    return (tmp_path / "store").as_uri()


@pytest.fixture
def store(uri):
    return Store(f"{uri}/demo")


@pytest.fixture
def machine(tmp_path, store):
    """Makes another machine: its folder of the sweep, and the mirror of it."""

    def make(name):
        folder = tmp_path / name / "demo"
        folder.mkdir(parents=True, exist_ok=True)
        return folder, Mirror(store, folder)

    return make


def put(folder, path, text):
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_text(text)


def kept(folder):
    """Every file of a sweep but the note of the last exchange."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name != STATE)
    return {str(path.relative_to(folder)): path.read_text() for path in paths}


JOURNAL = "replicates/c1-s0/attempt-0001.jsonl"
CHECKPOINT = "replicates/c1-s0/checkpoints/step-00000005/state.json"


def test_another_machine_gets_what_was_sent_and_sends_only_what_it_adds(machine):
    one, there = machine("one")
    put(one, JOURNAL, "a\n")
    put(one, "spec.json", "{}")
    assert there.send() == 2
    assert there.send() == 0
    two, here = machine("two")
    assert here.fetch() == 2
    assert kept(two) == kept(one)
    put(two, "replicates/c1-s0/attempt-0002.jsonl", "b\n")
    assert here.send() == 1
    assert there.fetch() == 1
    assert kept(two) == kept(one)


def test_a_journal_that_is_still_written_is_sent_again_as_it_grows(machine, store):
    one, there = machine("one")
    put(one, JOURNAL, "a\n")
    there.send()
    with (one / JOURNAL).open("a") as file:
        file.write("b\n")
    there.send()
    assert store.read(JOURNAL) == b"a\nb\n"


@pytest.mark.parametrize("is_noted", [True, False])
@pytest.mark.parametrize(("here", "there"), [("a\nb\n", "a\n"), ("a\n", "a\nb\n"), ("a\n", "a\n")])
def test_of_two_texts_of_a_journal_the_longer_stands_on_both_sides(
    machine, store, here, there, is_noted
):
    folder, mirror = machine("one")
    if is_noted:
        put(folder, JOURNAL, "a\n")
        mirror.send()
    put(folder, JOURNAL, here)
    store.write(JOURNAL, there.encode())
    mirror.fetch()
    mirror.send()
    assert (folder / JOURNAL).read_text() == max(here, there, key=len)
    assert store.read(JOURNAL).decode() == max(here, there, key=len)


def test_a_journal_that_two_machines_wrote_is_refused_and_kept_on_both_sides(machine, store):
    folder, mirror = machine("one")
    put(folder, JOURNAL, "a\nhere\n")
    store.write(JOURNAL, b"a\nthere\n")
    with pytest.raises(LedgerError, match=r"attempt-0001.jsonl and its copy in .* by two machines"):
        mirror.fetch()
    assert (folder / JOURNAL).read_text() == "a\nhere\n"
    assert store.read(JOURNAL) == b"a\nthere\n"


def test_the_store_keeps_what_a_folder_lost_except_checkpoints_of_ended_trials(machine, store):
    folder, mirror = machine("one")
    put(folder, JOURNAL, "a\n")
    put(folder, CHECKPOINT, "{}")
    mirror.send()
    (folder / JOURNAL).unlink()
    shutil.rmtree(folder / "replicates/c1-s0/checkpoints")
    mirror.send()
    assert store.versions().keys() == {JOURNAL}
    mirror.fetch()
    assert kept(folder) == {JOURNAL: "a\n"}


def test_a_checkpoint_removed_here_is_not_brought_back_before_the_store_knows(machine, store):
    folder, mirror = machine("one")
    put(folder, CHECKPOINT, "{}")
    mirror.send()
    shutil.rmtree(folder / "replicates/c1-s0/checkpoints")
    mirror.fetch()
    assert kept(folder) == {}


def test_half_written_files_and_those_of_one_machine_stay_where_they_are(machine, store):
    folder, mirror = machine("one")
    for path in (
        "driver.lock",
        "mlflow.json",
        ".spec.json.12.partial",
        "replicates/c1-s0/checkpoints/.step-00000005.partial/state.json",
        "report/index.html",
    ):
        put(folder, path, "x")
    mirror.send()
    assert store.versions().keys() == {"report/index.html"}


@pytest.mark.parametrize("path", ["../x.json", "replicates/../../x.json", "/x.json", "a//x.json"])
def test_no_name_in_a_store_leads_out_of_the_folder(machine, store, monkeypatch, path):
    folder, mirror = machine("one")
    store.write("spec.json", b"{}")
    honest = store.versions()
    monkeypatch.setattr(store, "versions", lambda: {**honest, path: "1"})
    monkeypatch.setattr(store, "download", lambda _, target: target.write_text("{}"))
    assert mirror.fetch() == 1
    assert kept(folder).keys() == {"spec.json"}
    assert not (folder.parent / "x.json").exists()


def test_what_changed_on_one_side_only_goes_to_the_other(machine, store):
    folder, mirror = machine("one")
    for path in ("trials.parquet", "curves.parquet"):
        put(folder, path, "old")
    mirror.send()
    put(folder, "trials.parquet", "newer here")
    store.write("curves.parquet", b"newer there")
    mirror.fetch()
    mirror.send()
    wanted = {"trials.parquet": "newer here", "curves.parquet": "newer there"}
    assert kept(folder) == wanted
    assert {path: store.read(path).decode() for path in store.versions()} == wanted


def test_a_damaged_note_of_the_last_exchange_costs_work_only(machine, store):
    folder, mirror = machine("one")
    put(folder, JOURNAL, "a\n")
    mirror.send()
    (folder / STATE).write_text("{")
    assert Mirror(store, folder).fetch() == 1
    assert Mirror(store, folder).send() == 0


# The lease ---------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch):
    """Leases that run out within a second."""
    monkeypatch.setattr(store_lease, "LEASE_SECONDS", 0.6)
    monkeypatch.setattr(store_lease, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(store_lease, "HEARTBEAT_SECONDS", 0.1)


def elsewhere(beats=1):
    """A lease that another machine wrote."""
    facts = {"host": "elsewhere", "pid": 7, "process_started": "boot:1", "beats": beats}
    return json.dumps(facts).encode()


def test_a_second_process_waits_until_the_first_has_given_the_lease_back(store, quick):
    waited = []
    first = StoreLease(store, waited.append)
    with first:
        second = StoreLease(store, waited.append)
        thread = threading.Thread(target=second.__enter__)
        thread.start()
        time.sleep(1.0)  # longer than the lease: the first one beats
        assert thread.is_alive()
        assert waited == [f"{process_facts()['host']} pid {os.getpid()}"]
    thread.join(5)
    assert not thread.is_alive()
    assert second.confirm()
    second.__exit__()
    assert len(store.names("leases")) == 1


def test_a_lease_of_a_process_that_ended_here_is_taken_at_once(store):
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import json; from orchestrator.leases import process_facts;"
            "print(json.dumps(process_facts()))",
        ],
        capture_output=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    store.create("leases/00000003.json", done.stdout)
    with StoreLease(store, pytest.fail):
        assert store.names("leases")[-1] == "00000004.json"


def test_a_machine_that_shows_no_life_is_replaced_when_its_lease_has_run_out(store, quick):
    store.create("leases/00000001.json", elsewhere())
    waited = []
    began = time.monotonic()
    with StoreLease(store, waited.append) as lease:
        assert time.monotonic() - began >= 0.6
        assert lease.confirm()
    assert waited == ["elsewhere pid 7"]


def hold_while_another_takes_over(lease, store):
    with lease:
        store.create("leases/00000002.json", elsewhere())
        time.sleep(5)


def test_a_holder_whose_lease_was_taken_over_is_interrupted(store, quick):
    def interrupt(signum, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    lease = StoreLease(store, pytest.fail)
    try:
        with pytest.raises(KeyboardInterrupt):
            hold_while_another_takes_over(lease, store)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert lease.lost_to == "elsewhere pid 7"
    assert json.loads(store.read("leases/00000002.json"))["host"] == "elsewhere"


def test_a_holder_that_lost_its_lease_sends_nothing_more(uri, tmp_path, capsys):
    console = Console(width=200)
    with kept_in_store(uri, tmp_path, "demo", console) as copy:
        put(tmp_path / "demo", JOURNAL, "late\n")
        Store(f"{uri}/demo").create("leases/00000009.json", elsewhere())
    assert not copy.is_complete
    assert JOURNAL not in Store(f"{uri}/demo").versions()
    assert "went to elsewhere pid 7" in capsys.readouterr().out


def test_a_store_that_creates_what_is_there_already_is_refused(store, monkeypatch):
    monkeypatch.setattr(Store, "create", lambda self, path, data: not self.write(path, data))
    with pytest.raises(StoreError, match="does not honour If-None-Match"):
        StoreLease(store, pytest.fail).__enter__()


def write_and_be_interrupted(uri, root, copies):
    with kept_in_store(uri, root, "demo", Console(width=200)) as copy:
        copies.append(copy)
        put(root / "demo", JOURNAL, "a\n")
        raise KeyboardInterrupt


def test_an_interrupted_call_still_sends_what_there_is(uri, tmp_path):
    copies = []
    with pytest.raises(KeyboardInterrupt):
        write_and_be_interrupted(uri, tmp_path, copies)
    assert copies[0].is_complete
    assert Store(f"{uri}/demo").read(JOURNAL) == b"a\n"


# What is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("runs/store", "no such kind of store; give s3://BUCKET/PREFIX"),
        ("gs://bucket/prefix", "no such kind of store; give s3://BUCKET/PREFIX"),
        ("s3://", "no such kind of store; give s3://BUCKET/PREFIX"),
        ("s3://key:secret@bucket/prefix", "--store holds credentials; leave them out"),
    ],
)
def test_a_uri_that_is_no_store_is_refused_without_its_secret(uri, message):
    with pytest.raises(ConfigError, match=message) as refused:
        Store(uri)
    assert "secret" not in str(refused.value).replace("AWS_SECRET_ACCESS_KEY", "")


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ConfigError, match=r"needs the package s3fs: pip install 'seedfront\[s3\]'"):
        Store("s3://bucket/prefix")


def test_a_root_in_a_store_is_refused_by_every_verb(capsys):
    assert main(["status", "demo", "--root", "s3://bucket/prefix"]) == 2
    assert "the root is a folder of this machine" in capsys.readouterr().err


def test_fetching_a_sweep_that_the_store_lacks_says_so(uri, tmp_path, capsys):
    assert main(["fetch", "demo", "--store", uri, "--root", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"no sweep 'demo' in the store {uri}\n"
    assert not (tmp_path / "demo").exists()


# A real S3 protocol ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def s3(tmp_path_factory):
    """An S3 server on loopback; the environment of its clients."""
    pytest.importorskip("moto")
    said = tmp_path_factory.mktemp("s3") / "said"
    with said.open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-p", "0"], stdout=log, stderr=log
        )
    deadline = time.monotonic() + 120
    while "Running on http" not in said.read_text():
        assert server.poll() is None, said.read_text()
        assert time.monotonic() < deadline, said.read_text()
        time.sleep(0.1)
    address = said.read_text().partition("Running on ")[2].split()[0]
    yield {
        "AWS_ACCESS_KEY_ID": "someone",
        "AWS_SECRET_ACCESS_KEY": "correct-horse-battery",
        "AWS_ENDPOINT_URL": address,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    server.terminate()
    server.wait()


@pytest.fixture
def bucket(s3, monkeypatch, request):
    """The URI of a new bucket."""
    for key, value in s3.items():
        monkeypatch.setenv(key, value)
    name = f"b{abs(hash(request.node.name)):x}"
    files, _, _ = store_module._opened("s3://any", "s3")
    files.mkdir(name)
    return f"s3://{name}/prefix"


def test_an_s3_store_creates_once_and_gives_back_what_it_got(bucket, tmp_path):
    store = Store(f"{bucket}/demo")
    assert store.versions() == {}
    assert [store.create("a/x", b"1"), store.create("a/x", b"2")] == [True, False]
    assert store.read("a/x") == b"1"
    before = store.version("a/x")
    store.write("a/x", b"3")
    assert store.versions() == {"a/x": store.version("a/x")}
    assert store.version("a/x") != before
    (tmp_path / "large").write_bytes(bytes(9_000_000))
    store.upload(tmp_path / "large", "b/y")
    store.download("b/y", tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == bytes(9_000_000)
    assert store.names("a") == ["x"]
    store.remove("a/x")
    store.remove("a/x")
    assert store.versions().keys() == {"b/y"}


def test_a_bucket_that_is_not_there_is_one_sentence(bucket):
    with pytest.raises(StoreError, match=r"the store s3://nowhere/x cannot be used \(.*bucket"):
        Store("s3://nowhere/x").write("y", b"")


@pytest.mark.slow
@pytest.mark.ray
def test_a_sweep_whose_machine_is_lost_is_continued_from_s3_on_another_root(fake, bucket):
    """Its driver is killed and its whole root is gone while two trials hang after a checkpoint."""
    hanging = {"when": {"seed": 2}, "attempts": 1, "at_step": 7, "what": "slow"}
    fake.write([1e-3, 2e-3], [0, 1, 2], checkpoint_every=5, mishaps=[hanging])
    store = Store(f"{bucket}/fake")
    driver = fake.start("--store", bucket)
    fake.wait_for(lambda: sum("checkpoints/" in path for path in store.versions()) == 2, driver)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    sent = {path: store.read(path) for path in store.versions() if path.endswith("0001.jsonl")}
    done = {path for path, text in sent.items() if b'"completed"' in text}
    assert (len(sent), len(done)) == (6, 4)
    shutil.rmtree(fake.sweep)
    other = fake.folder / "other"
    other.mkdir()
    os.symlink(fake.folder / "runs" / "data", other / "data")

    assert fake.run("--store", bucket, "--root", "other") == 0, fake.said
    folder = other / "fake"
    assert {path: (folder / path).read_bytes() for path in sent} == sent
    for path in sent:
        later = folder / path.replace("0001", "0002")
        assert later.exists() == (path not in done)
        assert path in done or opening(later)["resumed_from_step"] == 5
    there = {path: store.read(path) for path in store.versions() if not path.startswith("leases/")}
    assert {path: (folder / path).read_bytes() for path in there} == there
    assert {"spec.json", "trials.parquet", "curves.parquet", "report/index.html"} <= there.keys()
    assert sum(path.endswith("output.log") for path in there) == 6
    assert "correct-horse-battery" not in fake.said
    assert not any(b"correct-horse-battery" in text for text in there.values())
    said = fake.said
    assert fake.run("--store", bucket, "--root", "other") == 0
    assert "nothing to do" in fake.said[len(said) :]

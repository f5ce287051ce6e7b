"""What a signal to the driver leaves: no worker, true statuses, and a sweep that continues."""

import signal

import pytest

pytestmark = pytest.mark.ray


def interrupted(fake, number):
    """A sweep of two trials, the first done and the second in its midst, after a signal."""
    # The second seed's trial lasts longer than any test waits.
    fake.write([1e-3], [0, 1], mishaps=[{"when": {"seed": 1}, "at_step": 3, "what": "slow"}])
    driver = fake.start()
    fake.wait_for(
        lambda: any('"status":"completed"' in p.read_text() for p in fake.journals()), driver
    )
    fake.wait_for(lambda: sum('"step":3' in p.read_text() for p in fake.journals()) == 2, driver)
    driver.send_signal(number)
    assert driver.wait(60) == 130, fake.said
    assert "interrupted; the same command continues" in fake.said
    fake.assert_consistent(2)
    statuses = {run.data.tags["seed"]: run.info.status for run in fake.runs()}
    assert statuses == {"0": "FINISHED", "1": "KILLED"}
    assert [run.info.status for run in fake.runs("sweep")] == ["KILLED"]


def test_ctrl_c_leaves_true_statuses_and_no_worker(fake):
    interrupted(fake, signal.SIGINT)


@pytest.mark.slow
def test_after_sigterm_the_next_call_ends_what_is_left(fake):
    interrupted(fake, signal.SIGTERM)
    fake.write([1e-3], [0, 1])
    assert fake.run() == 0, fake.said
    fake.assert_consistent(2)
    assert set(fake.trials()["status"]) == {"completed"}
    assert {run.info.status for run in fake.runs()} == {"FINISHED"}

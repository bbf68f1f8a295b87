from cluster.worker.loading_times import LoadingTimes


def test_longer_steps_are_reported_in_their_order() -> None:
    now = 10.0
    times = LoadingTimes(lambda: now)
    for step, at in (
        ("importing torch", 10.1),
        ("loading weights", 12.0),
        ("loading weights", 12.5),
        ("warming up", 13.0),
    ):
        now = at
        times.begin(step)
    now = 13.2
    assert times.text() == " (importing torch 1.9 s, loading weights 1.0 s)"


def test_a_quick_start_has_no_steps_to_report() -> None:
    assert LoadingTimes(lambda: 1.0).text() == ""

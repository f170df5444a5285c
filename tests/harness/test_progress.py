"""What the bar counts."""

from harness.trial import Progress
from impls.seams import Emission, StepResult


def test_a_request_is_finished_when_all_its_samples_have_ended():
    progress = Progress(requests=2, samples=3)
    for i in range(5):
        progress.count(StepResult([Emission(f"r{i // 3}#{i % 3}", (1,), 0.0, "length")]))
    assert (progress.finished, progress.output_tokens, progress.steps) == (1, 5, 5)
    progress.count(StepResult([Emission("r1#2", (1, 2), 0.0, None)]))
    assert progress.finished == 1
    progress.count(StepResult([Emission("r1#2", (3,), 0.0, "stop")]))
    assert progress.finished == 2

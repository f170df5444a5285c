"""Where two arms' tokens part, what the arithmetic excuses, and what is a warning."""

from __future__ import annotations

import pandas as pd

from harness.equivalence import Divergence, compare, ends, mismatches


def requests(**outputs):
    rows = [{"request_id": k, "finish_reason": v[0], "output_token_ids": v[1]} for k, v in outputs.items()]
    return pd.DataFrame(rows)


def test_compare_by_hand():
    reference = requests(a=("length", [1, 2, 3]), b=("stop", [4, 5]), c=("length", [6, 7]), d=("error", []))
    other = requests(a=("length", [1, 2, 3]), b=("stop", [4, 9]), c=("aborted", [6]), d=("length", [1]))
    agreement = compare(reference, other)
    assert (agreement.requests, agreement.identical) == (2, 1)  # c and d did not end in both
    assert (agreement.common_tokens, agreement.tokens) == (4, 5)
    assert agreement.divergences == (Divergence("b", 1, 5, 9),)


def test_an_output_that_is_only_longer_is_not_identical():
    for ours, theirs in (([1, 2, 3], [1, 2]), ([1, 2], [1, 2, 3])):
        agreement = compare(requests(a=("length", ours)), requests(a=("stop", theirs)))
        assert (agreement.requests, agreement.identical, agreement.divergences) == (1, 0, ())
        assert (agreement.common_tokens, agreement.tokens) == (2, len(ours))
        (warning,) = ends(agreement)
        assert warning.startswith(f"token mismatch: request a ends after {len(theirs)} output tokens")
        assert warning.endswith(f"which ends after {len(ours)}")
    assert ends(compare(requests(a=("length", [1, 2])), requests(a=("stop", [1, 2])))) == []


def test_only_a_gap_above_the_tie_is_a_mismatch():
    near, far = Divergence("near", 3, 1, 2, gap=0.4), Divergence("far", 5, 1, 2, gap=0.7)
    judged = [near, far, Divergence("unjudged", 1, 1, 2)]
    (warning,) = mismatches(judged, 0.5)
    assert warning.startswith("token mismatch: request far differs at output token 5") and "0.7" in warning

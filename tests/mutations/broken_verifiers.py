"""The rules by which drafts stand or fall, broken."""

from __future__ import annotations

from change import Change

VERIFIER = "impls/decoding/verifier.py"
SPECULATIVE = "impls/decoding/speculative.py"
TYPICAL = "impls/decoding/typical_acceptance.py"
RANDOM = "impls/decoding/counter_random.py"
STEPS = "decoding/test_speculative_edges.py::test_known_steps"
JOINT = (
    "decoding/test_exact_speculation.py::test_speculation_samples_the_targets_joint_distribution[plain-sampled_drafts]"
)
UNSOUND = "decoding/test_speculative_edges.py::test_a_draft_whose_distribution_is_unsound_is_verified_as_one_hot"

VERIFIERS: dict[str, tuple[Change, str]] = {
    "greedy: a draft stands only where it is the argmax": (
        Change(VERIFIER, "draft == target_ids[start + j]", "draft >= target_ids[start + j]"),
        STEPS,
    ),
    "greedy: a draft is judged by the row before it": (
        Change(VERIFIER, "draft == target_ids[start + j]", "draft == target_ids[start + max(0, j - 1)]"),
        STEPS,
    ),
    "what follows a rejected draft falls": (
        Change(
            VERIFIER, "next((i for i, stands in enumerate(verdicts) if not stands), len(verdicts))", "sum(verdicts)"
        ),
        STEPS,
    ),
    "the last token is that of the row behind the last draft that stands": (
        Change(VERIFIER, "[start + count for start, count in", "[start + max(0, count - 1) for start, count in"),
        STEPS,
    ),
    "each sequence has a row for each draft and one more": (
        Change(
            VERIFIER,
            "return list(accumulate(row_counts(sequences), initial=0))[:-1]",
            "return list(range(len(sequences)))",
        ),
        "decoding/test_speculative_edges.py::test_different_numbers_of_drafts_in_one_batch",
    ),
    "random: by p/q, not by p": (
        Change(VERIFIER, "next(p) >= u * q_x", "next(p) >= u"),
        "decoding/test_exact_speculation.py::test_measured_acceptance_is_the_sum_of_min_p_q",
    ),
    "random: by chance": (Change(VERIFIER, "next(p) >= u * q_x", "next(p) >= 0.5 * q_x"), JOINT),
    "each draft has a chance of its own": (
        Change(VERIFIER, "positions = [seq.num_tokens + j for seq", "positions = [seq.num_tokens + 0 * j for seq"),
        JOINT,
    ),
    "acceptance shares no noise with drafting": (
        Change(VERIFIER, "Purpose.ACCEPT, device", "Purpose.DRAFT, device"),
        JOINT,
    ),
    "recovery shares no noise with drafting": (
        Change(VERIFIER, "purposes[i] = Purpose.RECOVER", "purposes[i] = Purpose.DRAFT"),
        JOINT,
    ),
    "no two purposes share noise": (
        Change(
            RANDOM,
            "_mix_(keys + (steps + 1) * _GAMMA) + (uses + 1) * _GAMMA",
            "_mix_(keys + (steps + 1) * _GAMMA) + (uses * 0 + 1) * _GAMMA",
        ),
        "decoding/test_counter_random.py::test_purposes_share_no_noise",
    ),
    "a rejected draft is replaced from max(p - q, 0): q": (
        Change(VERIFIER, "return (p - q).clamp_(min=0)", "return p"),
        JOINT,
    ),
    "a rejected draft is replaced from max(p - q, 0): 0": (
        Change(VERIFIER, "return (p - q).clamp_(min=0)", "return (p - q).abs_()"),
        JOINT,
    ),
    "the residual's q is the rejected draft's": (
        Change(VERIFIER, "self.q_row[i] + accepted[i] for i in drawn", "self.q_row[i] for i in drawn"),
        "decoding/test_speculative_edges.py::test_what_replaces_a_draft_comes_from_the_residual_of_that_draft",
    ),
    "where nothing is left of p - q it is drawn from p": (
        Change(VERIFIER, "torch.where(weights.sum(1, keepdim=True) > 0, weights, target)", "weights"),
        "decoding/test_speculative_edges.py::test_where_p_equals_q_the_recovered_token_is_drawn_from_p",
    ),
    "a one-hot draft that was rejected does not come back": (
        Change(VERIFIER, "for i in one_hot]] = 0.0", "for i in one_hot]] *= 1.0"),
        "decoding/test_speculative_edges.py::test_the_recovered_token_is_never_the_rejected_one_nor_outside",
    ),
    "a draft that its own distribution excludes is one-hot": (
        Change(VERIFIER, "unsound = ~(self.q[index] > 0)", "unsound = self.q[index] > 2"),
        UNSOUND,
    ),
    "q of drafts that were cut is not looked at": (
        Change(VERIFIER, "proposed.probs[: len(seq.draft_token_ids)]", "proposed.probs"),
        "decoding/test_speculative_edges.py::test_a_scheduler_may_cut_the_drafts_short",
    ),
    "drafts that fell are not emitted": (
        Change(SPECULATIVE, "[*seq.draft_token_ids[:n], token]", "[*seq.draft_token_ids, token]"),
        STEPS,
    ),
    "sampled sequences are judged by the random rule": (
        Change(SPECULATIVE, "accepted[i], last[i] = count, token", "last[i] = token"),
        "decoding/test_exact_speculation.py::test_measured_acceptance_is_the_sum_of_min_p_q",
    ),
    "typical: epsilon is the most that is asked": (
        Change(TYPICAL, "clamp_(max=epsilon)", "clamp_(min=epsilon)"),
        "decoding/test_typical_acceptance.py::test_the_threshold_is_the_papers",
    ),
    "typical: less is asked where the target is unsure": (
        Change(TYPICAL, "torch.exp(-entropy)", "torch.exp(entropy)"),
        "decoding/test_typical_acceptance.py::test_the_threshold_is_the_papers",
    ),
    "typical: the threshold has to be exceeded": (
        Change(TYPICAL, "> least[rows]", ">= least[rows]"),
        "decoding/test_typical_acceptance.py::test_a_draft_has_to_exceed_the_threshold_and_so_have_all_before_it",
    ),
    "typical: the last token is the argmax behind the last that stands": (
        Change(SPECULATIVE, "tokens = [target[starts[i] + count]", "tokens = [target[starts[i] + 0 * count]"),
        "decoding/test_typical_acceptance.py::test_every_verdict_in_the_decoder_is_the_thresholds",
    ),
}

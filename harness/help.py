"""What `python -m harness --help` prints: every group with its options, read from conf/, and examples to start from."""

from __future__ import annotations

from harness.compose import CONF, groups, options

MEANINGS = {
    "model": "which weights (model.path takes a GGUF file or a Hugging Face directory)",
    "device": "where they run",
    "batching": "who runs in this step",
    "kv_cache": "where keys and values live (kv_cache.budget: bytes, a fraction, or <n>tokens)",
    "prefix": "what is reused of equal prompt starts",
    "kv_dtype": "in what numbers keys and values are kept",
    "decoding": "how many tokens a step yields",
    "proposer": "who drafts tokens for decoding=speculative",
    "precision": "in what numbers weights and activations are kept and multiplied",
    "attention": "with which kernel",
    "execution": "how a step is launched",
    "topology": "who computes where",
    "target": "what is driven",
    "workload": "what traffic",
    "telemetry": "what is sampled beside the requests",
    "slo": "what a good request is",
    "price": "what an hour of the machine costs",
    "study": "which arms are compared",
}
EXAMPLES = """\
  python -m harness                                                       the default study on this machine
  python -m harness study=smoke                                           the same idea, much shorter
  python -m harness study=none batching=static workload.arrivals.rate=4   one arm, one trial
  python -m harness study=none batching=static,continuous study.trials=5  a free sweep
  python -m harness run_dir=results/runs/ladder/latest                    resume: what is recorded is kept
  python -m harness.report results/runs/ladder/latest                     rebuild summary and dashboard
  python -m harness --cfg job                                             every option with its value"""


def help_text() -> str:
    ordered = [*(g for g in MEANINGS if g in groups()), *(g for g in groups() if g not in MEANINGS)]
    lines = [f"  {group:<10} {MEANINGS.get(group, '')}: {', '.join(options(group))}" for group in ordered]
    lines += [
        f"  {path.parent.name}/{path.name}: {', '.join(options(f'{path.parent.name}/{path.name}'))}"
        for path in sorted(CONF.glob("*/*"))
        if path.is_dir()
    ]
    return "\n".join(
        [
            "LLM-serving techniques, one changed at a time, through the same seeded traffic.",
            "",
            "usage: python -m harness [group=option ...] [group.key=value ...]      a,b sweeps over a and b",
            "",
            "examples:",
            EXAMPLES,
            "",
            "groups and their options:",
            *lines,
            "",
            "also: seed, run_dir, isolation (process, inline), hydra/launcher. Bad input exits with status 2, a failed",
            "trial with 1; HYDRA_FULL_ERROR=1 shows the traceback.",
        ]
    )

"""Events of engines."""

from __future__ import annotations

from . import fields as f
from .kind import EventKind

KINDS = (
    EventKind(
        "swapped",
        "info",
        "The engine has a new version.",
        (
            f.ENGINE,
            f.SEQ,
            f.UPDATES,
            f.STEP.maybe,
            f.seconds("pause_seconds", "The engine was paused for this long."),
            f.WAIT_SECONDS,
            f.APPLY_SECONDS,
            f.seconds("confirm_seconds", "Comparing digests took this long."),
            f.seconds("stage_seconds", "Fetching and preparing before the pause took this long.").maybe,
            f.seconds("behind_seconds", "The version was published this long ago, by the clocks of both machines.").maybe,
            f.flag("full_scan", "It is 1 if all weights were compared with the digest."),
            f.integer("http_calls", "The server got this many requests so far.").maybe,
            f.text("kv_cache", "This word says what was done with the KV cache.").maybe,
            f.integer("preempted", "The pause preempted this many requests.").maybe,
            f.flag("live", "It is 1 if the delta was applied to the weights in the server's memory.").maybe,
            f.flag("loaded_anew", "It is 1 if a full checkpoint was loaded.").maybe,
            f.TRACE,
        ),
    ),
    EventKind(
        "swap-failed",
        "warning",
        "An update failed, and the engine continues with the old version.",
        (f.ENGINE.maybe, f.SEQ.maybe, f.UPDATES.maybe, f.ERROR, f.REASON),
    ),
    EventKind(
        "engine-quarantined",
        "error",
        "The engine stays paused because its weights are in an unknown state.",
        (f.ENGINE, f.SEQ, f.UPDATES, f.REASON),
    ),
    EventKind(
        "canary-passed",
        "debug",
        "A check of the server's results after an update found nothing wrong.",
        (f.SEQ, f.UPDATES, f.text("canary", "The check was `self` or `recorded`."), f.LARGEST, f.MEAN, f.TOKENS, f.SECONDS),
    ),
    EventKind("canary-failed", "error", "Such a check failed; `engine-quarantined` follows.", (f.SEQ, f.UPDATES, f.REASON)),
    EventKind(
        "canary-missing", "info", "The version is not compared with recorded tokens, but with prompts.", (f.SEQ, f.UPDATES, f.REASON)
    ),
    EventKind(
        "canary-learnt",
        "info",
        "At the first check, the server's decoding differs more from its prompts than usual. Later checks allow for this.",
        (f.LARGEST, f.MEAN),
    ),
    EventKind("repaired", "info", "A full load has repaired the engine.", (f.ENGINE, f.SEQ, f.UPDATES)),
    EventKind("resume-failed", "error", "The engine could not be resumed.", (f.ENGINE, f.ERROR, f.REASON)),
    EventKind("follow-failed", "error", "The thread that follows the run has ended.", (f.ENGINE, f.ERROR, f.REASON)),
    EventKind(
        "adapter-failed",
        "warning",
        "A LoRA adapter could not be brought to its newest version. Earlier versions stay loaded.",
        (f.ADAPTER, f.ERROR, f.REASON),
    ),
    EventKind("adapter-loaded", "info", "A LoRA adapter of a version was loaded into a vLLM server.", (f.ADAPTER, f.UPDATES)),
    EventKind("adapter-unloaded", "info", "A LoRA adapter of a version was unloaded.", (f.ADAPTER, f.UPDATES)),
    EventKind("draft-kept", "warning", "The server's draft model is not in the run, so it is not updated.", (f.REASON,)),
    EventKind("engine-lost", "warning", "The server does not answer.", (f.REASON,)),
    EventKind("adopted", "info", "The server was started with the weights of this version, so nothing is loaded.", (f.SEQ, f.UPDATES)),
    EventKind(
        "mirror-used",
        "info",
        "The server loads full checkpoints from a mirror, although nobody asked for one or nothing needed one so far.",
        (f.REASON,),
    ),
    EventKind(
        "engine-held",
        "info",
        "The server waits for its first version, is asleep, was paused by somebody else, or has weights in an unknown state.",
        (f.REASON,),
    ),
    EventKind(
        "engine-failed",
        "warning",
        "A trainer reads in a report that an engine could not take a version, or does not answer.",
        (f.READER, f.SEQ.maybe, f.STATE, f.REASON.maybe),
    ),
    EventKind("report-failed", "warning", "The engine's report could not be written.", (f.REASON,)),
)

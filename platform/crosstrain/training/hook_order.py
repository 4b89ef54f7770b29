"""The platform's hooks in call order; the run's callbacks are called between the two groups."""

from crosstrain.training.bad_steps import BadSteps
from crosstrain.training.callback import HookKinds
from crosstrain.training.carried import Settled
from crosstrain.training.saving import Saving
from crosstrain.training.step_log import StepLog
from crosstrain.training.tracking import Tracking
from crosstrain.training.validation import BestPointer, Validation

BEFORE_CALLBACKS: HookKinds = {"profile": None, "bad_steps": BadSteps}  # None: the callback plugin of this name
# The order matters: hooks after `settled` change nothing that the next step needs. `stragglers` adds notes to the
# metrics before `log` prints them, `log` and `validation` fill the row before `tracking` sends it to the trackers,
# and `best` requests a save before `saving` runs.
AFTER_CALLBACKS: HookKinds = {
    "settled": Settled,
    "stragglers": None,
    "log": StepLog,
    "validation": Validation,
    "prompt_samples": None,
    "best": BestPointer,
    "tracking": Tracking,
    "saving": Saving,
    "digests": None,
}

"""The platform's hooks, in the order in which they are called; the run's callbacks come between the two groups."""

from crosstrain.training.bad_steps import BadSteps
from crosstrain.training.profiling import Profiling
from crosstrain.training.prompt_samples import PromptSamples
from crosstrain.training.saving import Saving
from crosstrain.training.step_log import StepLog
from crosstrain.training.tracking import Tracking
from crosstrain.training.validation import BestPointer, Validation

BEFORE_CALLBACKS = {"profile": Profiling, "bad_steps": BadSteps}
# Each of these uses what those before it have left: log and validation fill the row, best asks for a save.
AFTER_CALLBACKS = {
    "log": StepLog,
    "validation": Validation,
    "prompt_samples": PromptSamples,
    "best": BestPointer,
    "tracking": Tracking,
    "saving": Saving,
}

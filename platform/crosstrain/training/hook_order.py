"""The platform's hooks in call order; the run's callbacks are called between the two groups."""

from crosstrain.training.bad_steps import BadSteps
from crosstrain.training.profiling import Profiling
from crosstrain.training.prompt_samples import PromptSamples
from crosstrain.training.saving import Saving
from crosstrain.training.step_log import StepLog
from crosstrain.training.tracking import Tracking
from crosstrain.training.validation import BestPointer, Validation

BEFORE_CALLBACKS = {"profile": Profiling, "bad_steps": BadSteps}
# The order matters: `log` and `validation` fill the row before `tracking`, and `best` requests a save before `saving`.
AFTER_CALLBACKS = {
    "log": StepLog,
    "validation": Validation,
    "prompt_samples": PromptSamples,
    "best": BestPointer,
    "tracking": Tracking,
    "saving": Saving,
}

"""Crosstrain: train any model with any runner, both chosen in one YAML file.

Plugins import the names below, as in `from crosstrain import Runner, registry`. Programs and notebooks call
functions such as `crosstrain.train(...)`. A name is imported when it is first used, so importing this package does not
import torch. The Python function of a command plugin has the command's name, such as `crosstrain.plan`.
"""

import ast
import os
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

# torch loads libgomp. The threads of libgomp spin while they wait for each other. If other programs use the same cores,
# the spinning threads keep the slowest thread from running, and steps take several times longer.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

if TYPE_CHECKING:  # imported only by mypy and editors; some names belong to plugins
    from crosstrain_plugins.builtin.commands.prepare.filter import Dropped, Filter
    from crosstrain_plugins.builtin.commands.prepare.reader import (
        Chunk,
        Document,
        FileReader,
        split_file,
    )
    from crosstrain_plugins.builtin.commands.samples.samples import SampleView
    from crosstrain_plugins.builtin.datasets.vision.conversations import IMAGE, IMAGE_ID, SHARED, Style
    from crosstrain_plugins.builtin.datasets.vision.image import ImageTooLarge, open_image, open_image_file
    from crosstrain_plugins.builtin.datasets.vision.image_dataset import (
        Annotation,
        Example,
        ImageDataset,
        ImageDatasetOptions,
        ImageProcessor,
        ImagePrompts,
        Processors,
        TextProcessor,
        VqaDataset,
        processors,
    )
    from crosstrain_plugins.builtin.models.hugging_face.base import (
        DropRate,
        TransformersExport,
        TransformersModel,
        TransformersStructure,
        TransformersWeights,
    )
    from crosstrain_plugins.builtin.models.hugging_face.internals import build_transformers
    from crosstrain_plugins.builtin.objectives.episode import Environment, Episode, Reward, RewardOptions
    from crosstrain_plugins.builtin.optimizers.matrix_optimizer import MatrixOptimizer
    from crosstrain_plugins.builtin.rewards.program import run_python
    from crosstrain_plugins.builtin.runners.sharding import check_elementwise
    from crosstrain_plugins.builtin.runners.used_parameters import UsedParameters

    from crosstrain.api.evaluate import evaluate
    from crosstrain.api.evaluation import Evaluation
    from crosstrain.api.model import OpenModel, open
    from crosstrain.api.run import Run
    from crosstrain.api.train import train
    from crosstrain.checkpoint.boxes import (
        Box,
        Piece,
        Shard,
        dtensor_pieces,
        flat_range_pieces,
        whole_pieces,
        without_padding,
    )
    from crosstrain.checkpoint.folders import find_checkpoint, step_folder
    from crosstrain.cli.command import Command
    from crosstrain.config.batch import RolloutOptions
    from crosstrain.config.bounds import (
        AllowInfinity,
        FilePath,
        Fraction,
        NonNegativeFloat,
        NonNegativeInt,
        PositiveFloat,
        PositiveInt,
        Text,
    )
    from crosstrain.config.load import Config, ProjectLike, load_config
    from crosstrain.config.pretrained_folder import pretrained_folder
    from crosstrain.config.registry import registry
    from crosstrain.config.run_options import RunOptions
    from crosstrain.config.schema import Component, NoOptions, OptionError, to_plain
    from crosstrain.data.chat import Conversation, EncodeText, Message, PromptBuilder, SampleError
    from crosstrain.data.dataset import SPLITS, Dataset, Split, SplitOptions
    from crosstrain.data.tokenizer import TextTokenizer, load_tokenizer
    from crosstrain.distributed.group import Group
    from crosstrain.engine.footprint import Layout, PlanContext, Sizes, all_reduced, replicated, scattered
    from crosstrain.engine.held_state import HeldState
    from crosstrain.engine.optimizer import MakeOptimizer, NamedParameters, create_state, global_norm
    from crosstrain.engine.runner import (
        Capabilities,
        ContextOptions,
        Runner,
        StepResult,
        seed_dropout,
        to_device,
    )
    from crosstrain.inference.generation import Sampling, as_prompt, generate
    from crosstrain.inference.metric import Metric
    from crosstrain.inference.perplexity import LossMetrics, evaluate_loss
    from crosstrain.inference.policy import Policy
    from crosstrain.modeling.adapter import Adapter, Around
    from crosstrain.modeling.base import LanguageModel, Model
    from crosstrain.modeling.cross_entropy import Logits, token_cross_entropy
    from crosstrain.modeling.forward_mode import PLAIN, ForwardMode, Head, takes_mode
    from crosstrain.modeling.meta_init import has_values, materialize, parameters_on_meta
    from crosstrain.modeling.objective import Completion, Objective, log_probabilities
    from crosstrain.modeling.structure import Ends, Structure
    from crosstrain.modeling.weights import Excerpt, Export, Merge, Quantized, ReadParameter, Source, Weights
    from crosstrain.monitor.metrics import Row, StepMetrics, flat, scalars, texts
    from crosstrain.monitor.tracker import TrackedRun, Tracker
    from crosstrain.training.callback import Callback
    from crosstrain.training.preflight_check import PreflightCheck, Start
    from crosstrain.training.validation import Validation
    from crosstrain.utils.errors import (
        CheckpointError,
        ConfigError,
        DataError,
        EmptySplit,
        TrainingError,
        UserError,
        did_you_mean,
        explained,
        first_line,
        os_errors_as,
        printable,
        sentence,
    )
    from crosstrain.utils.files import (
        cache_folder,
        open_regular,
        read_end,
        read_regular,
        replacing,
        write_atomically,
        write_json,
    )
    from crosstrain.utils.limited_process import LimitedProcess, LimitError
    from crosstrain.utils.logging import log
    from crosstrain.utils.optional_deps import require
    from crosstrain.utils.rng import derive_seed, generator
    from crosstrain.utils.timers import Timers
    from crosstrain.utils.trust import check_command, check_source
    from crosstrain.utils.types import IGNORE_INDEX, Batch, MicroBatch, Sample, Step
    from crosstrain.utils.units import finite, is_number

__version__ = "0.1.0"

_PACKAGES = ("crosstrain", "crosstrain_plugins")


@cache
def homes() -> dict[str, str]:
    """Return public name -> module, read from the imports above, so that all tools use the same list of names."""
    source = ast.parse(Path(__file__).read_bytes())
    found: dict[str, str] = {}
    for node in ast.walk(source):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] in _PACKAGES:
            found |= {alias.name: node.module for alias in node.names}
    return found


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted(homes())
    if not name.startswith("_"):
        if name in homes():
            return getattr(import_module(homes()[name]), name)
        if (function := import_module("crosstrain.cli.command").python_function(name)) is not None:
            return function
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *homes()]

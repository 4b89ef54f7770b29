"""Packages that only some components need, and the extra of the distribution that brings each."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from crosstrain.utils.errors import UserError

EXTRAS = {
    "deepspeed": "deepspeed",
    "timm": "vision",
    "torchvision": "vision",
    "PIL": "vision",
    "webdataset": "vision",
    "braceexpand": "vision",
    "peft": "vision",
    "pycocoevalcap": "vision",
    "uvicorn": "serve",
    "starlette": "serve",
    "pydantic": "serve",
    "plotly": "report",
    "jinja2": "report",
    "matplotlib": "report",
    "lm_eval": "eval",
    "fairscale": "offload",
    "pyarrow": "parquet",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "backports": "corpus",
    "datasets": "corpus",
    "ftfy": "corpus",
    "mwparserfromhell": "corpus",
    "py3langid": "corpus",
    "rensa": "corpus",
    "tiktoken": "corpus",
    "trafilatura": "corpus",
}


def absent_package(error: Exception) -> str | None:
    """The top-level package whose absence `error` reports, if that is what it reports."""
    name = error.name.split(".")[0] if isinstance(error, ModuleNotFoundError) and error.name else ""
    return name if name and importlib.util.find_spec(name) is None else None


def missing(what: str, package: str) -> UserError:
    """The error for a component that needs a package which is not installed."""
    wanted = f"'crosstrain[{EXTRAS[package]}]'" if package in EXTRAS else package
    return UserError(f"{what} needs the package {package}, which is not installed; run: pip install {wanted}")


def require(module: str, what: str) -> Any:
    """Import a module that comes with an extra; UserError naming the extra where it is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = absent_package(error)
        if package is None:
            raise
        raise missing(what, package) from error

"""Optional dependencies: packages that only some components need, and the extras that install them."""

import importlib.util
from typing import Any

from crosstrain.utils.errors import UserError

EXTRAS = {  # module -> extra
    module: extra
    for extra, modules in {
        "deepspeed": "deepspeed",
        "vision": "timm torchvision PIL webdataset braceexpand pycocoevalcap",
        "adapters": "peft bitsandbytes",
        "serve": "uvicorn starlette pydantic",
        "report": "plotly jinja2 matplotlib tree_sitter tree_sitter_bash",
        "eval": "lm_eval",
        "gguf": "gguf",
        "sweep": "optuna",
        "float8": "torchao",
        "offload": "fairscale",
        "parquet": "pyarrow",
        "s3": "s3fs",
        "gcs": "gcsfs",
        "azure": "adlfs",
        "ray": "ray",
        "wandb": "wandb",
        "mlflow": "mlflow",
        "corpus": "backports ftfy mwparserfromhell py3langid rensa trafilatura",
    }.items()
    for module in modules.split()
}


def absent_package(error: Exception) -> str | None:
    """Return the missing top-level package for an import error; None for any other error."""
    name = error.name.split(".")[0] if isinstance(error, ModuleNotFoundError) and error.name else ""
    return name if name and importlib.util.find_spec(name) is None else None


def missing(what: str, package: str) -> UserError:
    """Return the error for a component that needs a missing package."""
    wanted = f"'crosstrain[{EXTRAS[package]}]'" if package in EXTRAS else package
    return UserError(f"{what} needs the package {package}, which is not installed; run: pip install {wanted}")


def require(module: str, what: str) -> Any:
    """Import a module that belongs to an extra. Raises UserError, with the extra's name, if that module is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (package := absent_package(error)) is None:
            raise
        raise missing(what, package) from error

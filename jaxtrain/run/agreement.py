"""What all processes of a run must have alike, compared before they wait for one another in a collective."""

from jaxtrain.config.secrets import redacted
from jaxtrain.metrics.history import flat
from jaxtrain.metrics.runinfo import package_versions
from jaxtrain.run.assemble import Run
from jaxtrain.run.resume import is_within
from jaxtrain.run.spec import RunSpec
from jaxtrain.runtime.distributed import Facts

# What processes may have of their own: where they find and keep files, what their host does ahead, and what only
# process 0 writes. Whether data at another path is the same data is told by its content.
_MAY_DIFFER = (
    "compilation_cache",
    "data.path",
    "data.validation_path",
    "data.tokenizer.path",
    "train.prefetch",
    "train.workers",
    "logging.every",
    "logging.tensorboard",
    "logging.wandb",
    "logging.mlflow",
    "logging.project",
    "logging.tags",
)


def spec_facts(spec: RunSpec) -> Facts:
    """Return what all processes must have alike before they compile: config, versions, directory."""
    facts = {}
    # Both values of what differs are shown, and a secret that differs between hosts trains the same.
    for key, value in flat(redacted(spec.config.model_dump(mode="json"))).items():
        if not is_within(key, _MAY_DIFFER):
            facts[key] = (str(value), spec.loaded.origins.get(key, ""))
    for package, version in package_versions().items():
        facts[f"version of {package}"] = (str(version), "")
    facts["directory of the run"] = (str(spec.run_dir), "")
    facts["--resume"] = (str(spec.resume), "")
    return facts


def run_facts(run: Run) -> Facts:
    """Return what all processes must have alike once data is read: the rows of each batch, the compiler options."""
    facts = {f"data ({name})": (str(value), "") for name, value in flat(run.stream).items()}
    for name, value in run.step.compiler_options.used.items():
        facts[f"compiler option {name}"] = (str(value), "")
    return facts

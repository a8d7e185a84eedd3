"""The names, and arguments, of BytePS's modules for TensorFlow, Keras and MXNet; and Horovod's.

They are read in the sources: no interpreter has all of the frameworks.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import byteps

PACKAGE = Path(byteps.__file__).parent
DOCUMENT = Path(__file__).resolve().parents[2] / "docs/migrating.md"
BASICS = "init shutdown suspend resume size local_size rank local_rank"

#: By module and name: BytePS's arguments in their order, which ours begin with.
BYTEPS = {
    "tensorflow": {
        "push_pull": "tensor scope average device_dense device_sparse compression op enable_async",
        "broadcast": "tensor root_rank scope name is_variable",
        "broadcast_variables": "variables root_rank scope",
        "broadcast_global_variables": "root_rank",
        "BroadcastGlobalVariablesHook": "root_rank device",
        "DistributedOptimizer": "optimizer name use_locking device_dense device_sparse compression "
        "sparse_as_dense backward_passes_per_step op",
        "DistributedGradientTape": "gradtape device_dense device_sparse compression "
        "sparse_as_dense op",
    },
    "keras": {
        "DistributedOptimizer": "optimizer name device_dense device_sparse compression "
        "sparse_as_dense",
        "broadcast_global_variables": "root_rank",
        "push_pull": "value name average",
        "broadcast": "value root_rank name",
        "load_model": "filepath custom_optimizers custom_objects compression",
    },
    "keras/callbacks.py": {
        "BroadcastGlobalVariablesCallback": "root_rank device",
        "MetricAverageCallback": "device",
        "LearningRateScheduleCallback": "multiplier start_epoch end_epoch staircase "
        "momentum_correction steps_per_epoch initial_lr",
        "LearningRateWarmupCallback": "warmup_epochs momentum_correction steps_per_epoch verbose "
        "initial_lr",
    },
    "tensorflow/distribute.py": {"MirroredStrategy": "devices cross_device_ops"},
    "mxnet": {
        "byteps_push_pull": "tensor version priority name is_average",
        "byteps_declare_tensor": "name",
        "broadcast_parameters": "params root_rank",
        "DistributedOptimizer": "optimizer",
        "DistributedTrainer": "params optimizer optimizer_params root_rank compression_params",
    },
}
#: Names of these that are no functions or classes of their own there.
VALUES = {
    "tensorflow": f"{BASICS} get_pushpull_speed Compression Average Sum Adasum",
    "keras": f"{BASICS} Compression callbacks",
    "mxnet": f"{BASICS} Compression",
}
PROCESS_SETS = "ProcessSet global_process_set add_process_set remove_process_set"
BUILT = (
    "mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built nccl_built ddl_built "
    "ccl_built cuda_built rocm_built"
)
COMMON = f"init shutdown is_initialized start_timeline stop_timeline {BASICS} cross_rank cross_size"
#: Horovod's public names. Those that are not here are told in the document.
HOROVOD = {
    "tensorflow": f"{COMMON} {BUILT} {PROCESS_SETS} Compression elastic allgather_object "
    "broadcast_object broadcast_object_fn broadcast_variables allgather grouped_allgather "
    "broadcast broadcast_ allreduce grouped_allreduce reducescatter grouped_reducescatter alltoall "
    "is_homogeneous rank_op local_rank_op size_op local_size_op process_set_included_op Average "
    "Sum Adasum Min Max Product join SyncBatchNormalization broadcast_global_variables "
    "BroadcastGlobalVariablesHook DistributedOptimizer DistributedGradientTape "
    "PartialDistributedGradientTape",
    "keras": f"{COMMON} {BUILT} global_process_set Compression callbacks elastic Average Sum "
    "Adasum DistributedOptimizer PartialDistributedOptimizer broadcast_global_variables allreduce "
    "allgather broadcast reducescatter load_model",
    "mxnet": f"{COMMON} {BUILT} {PROCESS_SETS} Compression allgather allgather_object "
    "broadcast_object allreduce allreduce_ grouped_allreduce grouped_allreduce_ alltoall broadcast "
    "broadcast_ broadcast_parameters DistributedOptimizer DistributedTrainer grouped_allgather "
    "reducescatter grouped_reducescatter Average Sum Adasum Min Max Product join barrier",
    "keras/elastic.py": "KerasState CommitStateCallback UpdateBatchStateCallback "
    "UpdateEpochStateCallback run",
    "tensorflow/elastic.py": "TensorFlowState TensorFlowKerasState run",
}
#: Horovod's arguments of its module for MXNet, all of which are taken by name.
SCALES = "prescale_factor postscale_factor process_set"
HOROVOD_ARGUMENTS = {
    "allreduce": f"tensor average name priority {SCALES} op",
    "allreduce_": f"tensor average name priority {SCALES} op",
    "grouped_allreduce": f"tensors average name priority {SCALES} op",
    "grouped_allreduce_": f"tensors average name priority {SCALES} op",
    "allgather": "tensor name priority process_set",
    "grouped_allgather": "tensors name priority process_set",
    "broadcast": "tensor root_rank name priority process_set",
    "broadcast_": "tensor root_rank name priority process_set",
    "alltoall": "tensor splits name priority process_set",
    "reducescatter": f"tensor op name priority {SCALES}",
    "grouped_reducescatter": f"tensors op name priority {SCALES}",
    "broadcast_object": "obj root_rank name process_set",
    "allgather_object": "obj name process_set",
    "broadcast_parameters": "params root_rank prefix",
    "DistributedOptimizer": "optimizer gradient_predivide_factor num_groups process_set",
    "DistributedTrainer": "params optimizer optimizer_params compression "
    "gradient_predivide_factor prefix num_groups process_set",
}


def tree_of(path):
    return ast.parse(path.read_text())


def public(module):
    """The names in a module's ``__all__``, and what its ``__getattr__`` answers for."""
    path = PACKAGE / module
    if path.is_dir():
        path = path / "__init__.py"
    names = set()
    for node in tree_of(path).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "__all__":
            names |= {element.value for element in node.value.elts}
        if isinstance(node, ast.FunctionDef) and node.name == "__getattr__":
            constants = [one for one in ast.walk(node) if isinstance(one, ast.Constant)]
            names |= {str(one.value) for one in constants if str(one.value).isidentifier()}
    return names


def arguments(module, name):
    """Those of a function, or of a class, in whichever file of the module it stands."""
    path = PACKAGE / module
    # Files that are public, beside the module itself.
    for file in sorted(path.glob("[!_]*.py")) if path.is_dir() else [path]:
        for node in tree_of(file).body:
            if getattr(node, "name", None) != name:
                continue
            if isinstance(node, ast.ClassDef):
                methods = [one for one in node.body if getattr(one, "name", "") == "__init__"]
                return [argument.arg for argument in methods[0].args.args][1:]
            return [argument.arg for argument in node.args.args]
    raise AssertionError(f"{module} defines no {name}")


@pytest.mark.parametrize("module", BYTEPS)
def test_byteps(module):
    missing = {*BYTEPS[module], *VALUES.get(module, "").split()} - public(module)
    assert not missing
    for name, wanted in BYTEPS[module].items():
        found = arguments(module, name)
        assert found[: len(wanted.split())] == wanted.split(), f"{module}: {name}"


def test_both_names_of_the_keras_module_are_one():
    aliases = {
        alias.name
        for node in ast.walk(tree_of(PACKAGE / "tensorflow/keras/__init__.py"))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert {"*", "__all__"} <= aliases
    assert public("tensorflow/keras/callbacks.py") == public("keras/callbacks.py")


@pytest.mark.parametrize("module", HOROVOD)
def test_horovod(module):
    missing = set(HOROVOD[module].split()) - public(module)
    text = DOCUMENT.read_text()
    told = text[text.index("### Names that are not there") :]
    untold = sorted(name for name in missing if f"`{name}`" not in told)
    assert not untold, f"neither in byteps.{module} nor in {DOCUMENT.name}: {untold}"


@pytest.mark.parametrize("name", HOROVOD_ARGUMENTS)
def test_horovods_arguments_for_mxnet(name):
    missing = set(HOROVOD_ARGUMENTS[name].split()) - set(arguments("mxnet", name))
    assert not missing


@pytest.mark.parametrize("module", ["tensorflow", "keras", "mxnet"])
def test_the_document_has_the_names_of_byteps(module):
    """Each by itself, or by a page of the module's that has it."""
    pages = ("tensorflow.md", "keras.md", "mxnet.md")
    text = DOCUMENT.read_text() + "".join((DOCUMENT.parent / page).read_text() for page in pages)
    untold = [name for name in BYTEPS[module] if name not in text]
    assert not untold

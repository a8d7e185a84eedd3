"""The names that programs for BytePS and Horovod use, and what describes them."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import byteps
import byteps.common
import byteps.errors
import byteps.torch
import byteps.torch.cross_barrier
import byteps.torch.parallel
from byteps import _native

BYTEPS = """
Compression byteps_push_pull push_pull poll synchronize declare init shutdown suspend resume size
local_size rank local_rank DistributedOptimizer broadcast_parameters broadcast_optimizer_state
broadcast_object push_pull_async push_pull_inplace push_pull_async_inplace get_pushpull_speed
byteps_push_pull_group byteps_torch_set_num_grads push_pull_group_sync_inplace
""".split()
HOROVOD = """
init shutdown is_initialized rank size local_rank local_size cross_rank cross_size allreduce
allreduce_ allreduce_async allreduce_async_ grouped_allreduce grouped_allreduce_
grouped_allreduce_async grouped_allreduce_async_ broadcast broadcast_ broadcast_async
broadcast_async_ broadcast_object broadcast_parameters broadcast_optimizer_state barrier poll
synchronize Compression DistributedOptimizer Average Sum start_timeline stop_timeline
global_process_set is_homogeneous mpi_threads_supported mpi_enabled mpi_built gloo_enabled
gloo_built nccl_built ddl_built ccl_built cuda_built rocm_built HorovodInternalError
HostsUpdatedInterrupt ProcessSet add_process_set remove_process_set get_process_set_ids_and_ranks
reducescatter reducescatter_async grouped_reducescatter grouped_reducescatter_async alltoall
alltoall_async sparse_allreduce_async Adasum Min Max Product join
""".split()
PACKAGE = Path(byteps.__file__).parent


def parameters(function):
    return list(inspect.signature(function).parameters)


def test_names():
    for name in BYTEPS + HOROVOD:
        assert hasattr(byteps.torch, name), name
        assert name in byteps.torch.__all__, name
    for name in byteps.torch.__all__:
        assert hasattr(byteps.torch, name), name
    # `import byteps.torch.cross_barrier as bps` takes the place of `import byteps.torch as bps`.
    assert {*byteps.torch.__all__, "CrossBarrier"} == set(byteps.torch.cross_barrier.__all__)
    for module in (byteps.common, byteps.errors, byteps.torch.cross_barrier):
        for name in module.__all__:
            assert hasattr(module, name), name


def test_arguments():
    bps = byteps.torch
    push_pull = ["tensor", "average", "name", "version", "priority"]
    for function in (bps.push_pull_async, bps.push_pull_inplace, bps.push_pull_async_inplace):
        assert parameters(function) == [*push_pull, "op", "process_set", "backup_workers"]
    others = ["compression", "op", "process_set", "backup_workers"]
    assert parameters(bps.push_pull) == [*push_pull, *others]
    assert parameters(bps.resume) == ["num_workers", "num_servers", "global_rank", "context"]
    assert parameters(bps.broadcast_parameters)[:3] == ["params", "root_rank", "prefix"]
    assert parameters(bps.broadcast_optimizer_state)[:3] == ["optimizer", "root_rank", "prefix"]
    assert parameters(bps.broadcast_object)[:3] == ["obj", "root_rank", "name"]
    optimizer = ["optimizer", "named_parameters", "compression", "backward_passes_per_step"]
    assert parameters(bps.DistributedOptimizer)[:4] == optimizer
    wrapped = ["module", "device_ids", "broadcast_buffers", "compression"]
    assert parameters(byteps.torch.parallel.DistributedDataParallel)[:4] == wrapped
    overlapping = ["model", *optimizer, "num_steps", "backup_workers"]
    assert parameters(byteps.torch.cross_barrier.CrossBarrier) == overlapping


def public(module):
    for name in module.__all__:
        thing = getattr(module, name)
        if inspect.isfunction(thing) or inspect.isclass(thing):
            yield f"{module.__name__}.{name}", thing
        if inspect.isclass(thing):
            for method, function in vars(thing).items():
                if inspect.isfunction(function) and not method.startswith("_"):
                    yield f"{module.__name__}.{name}.{method}", function


def test_all_is_described_and_typed():
    framework = byteps.torch, byteps.torch.parallel, byteps.torch.cross_barrier
    for module in (byteps.common, byteps.errors, *framework):
        assert module.__doc__
        for name, thing in public(module):
            assert inspect.getdoc(thing), f"{name} has no docstring"
            if inspect.isfunction(thing):
                signature = inspect.signature(thing)
                assert signature.return_annotation is not inspect.Signature.empty, name
                for parameter in signature.parameters.values():
                    typed = parameter.annotation is not inspect.Parameter.empty
                    assert typed or parameter.name == "self", f"{name}: {parameter.name}"


def test_errors():
    for name in byteps.errors.__all__:
        error = getattr(byteps.errors, name)
        assert issubclass(error, byteps.errors.BytePSError) and issubclass(error, RuntimeError)
    assert issubclass(byteps.errors.ConfigError, ValueError)
    assert issubclass(byteps.errors.WaitTimeoutError, TimeoutError)
    assert issubclass(byteps.errors.TensorError, TypeError)


def test_stubs():
    """The stub file names what the extension module has, with the same arguments."""
    assert (PACKAGE / "py.typed").exists()
    stub = ast.parse((PACKAGE / "_native.pyi").read_text())
    functions = {node.name: node for node in stub.body if isinstance(node, ast.FunctionDef)}
    classes = {node.name for node in stub.body if isinstance(node, ast.ClassDef)}
    public = {name for name in dir(_native) if not name.startswith("_")}
    assert public == set(functions) | classes
    for name, node in functions.items():
        assert [a.arg for a in node.args.args] == parameters(getattr(_native, name)), name


def test_no_framework_is_imported():
    code = "import sys, byteps.common, byteps.errors; print({'torch', 'numpy'} & set(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "set()"

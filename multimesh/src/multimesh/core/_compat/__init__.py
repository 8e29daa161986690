"""Everything of JAX that is not its documented interface. CONTRIBUTING.md lists it (jax 0.10 and later).

Private parts make calls faster, and tell how processes were launched. Each has a public fallback with the same results,
except where processes meet: if JAX has moved the part, if this JAX was never tried, or under
``MULTIMESH_PUBLIC_JAX=1``. The code asks what a JAX has, never for its version.
"""

from multimesh.core._compat import versions
from multimesh.core._compat.versions import (
    SUPPORTED,
    DeviceList,
    array_of_shards,
    check_version,
    copy_shards,
    explicit_transfers,
    forget_pruned,
    tell_change,
    trace_context,
)

with check_version():
    from multimesh.core._compat.equations import callee_of, evaluate, rename, row_aval, variable
    from multimesh.core._compat.erase import erase
    from multimesh.core._compat.jaxprs import (
        PRIMITIVES,
        Literal,
        abstractify,
        add_p,
        call_primitive,
        cast_weak_type,
        constant_results,
        copy,
        copy_p,
        dce,
        device_put_p,
        hoist,
        is_differentiated,
        is_ref,
        is_tracer,
        jaxpr_as_fun,
        jit_p,
        memory_kind,
        nbytes,
        optimization_barrier_p,
        part,
        primal,
        remat_p,
        replace_meshes,
        scan_counts,
        scan_params,
        shape_of,
        sharding_constraint_p,
        stack,
        struct,
        subjaxprs,
    )
    from multimesh.core._compat.lines import (
        REMATTED,
        caller_line,
        error_line,
        explain_trace,
        invalid_value,
        is_raised_by_jax,
        is_transposed_last,
        keep_line,
        remedy_of_sizes,
        scopes,
        scopes_and_transpositions,
        set_name,
        user_line,
        warn_at,
        without_transpositions,
    )
    from multimesh.core._compat.processes import (
        device_put_address,
        has_backends,
        is_compile_only,
        key_value_store,
        launcher,
        limit_start,
        offerer,
        own_address,
        process_count,
        process_index,
        puller,
    )
    from multimesh.core._compat.traces import (
        abstract_mesh_context,
        auto,
        bind,
        devices_free,
        eager,
        explicit_spec,
        fit_to_mesh,
        fit_to_type,
        has_rows,
        identity_primitive,
        in_a_trace,
        leave_auto,
        leave_mesh,
        without_mesh,
    )
    from multimesh.core._compat.typed import (
        carry_spec,
        common_mesh,
        constrain,
        divide,
        enter_mesh,
        fill,
        fit_auto,
        fit_types,
        is_typed,
        partitions,
        row_struct,
        struct_of,
        with_layout,
        with_rows,
    )

versions.tell()

//! Variables of BytePS and ByteScheduler that have no effect here, each with the reason, and names
//! that are meant for others.
//!
//! Setting one of these prints one line. Silence would leave the user to believe that it works.

/// A variable of theirs that does nothing here.
pub(super) struct Known {
    pub(super) names: &'static [&'static str],
    /// Values that change nothing there either, and are passed over in silence.
    pub(super) harmless: &'static [&'static str],
    /// Completes "has no effect here: ".
    pub(super) reason: &'static str,
}

const fn known(
    names: &'static [&'static str],
    harmless: &'static [&'static str],
    reason: &'static str,
) -> Known {
    Known { names, harmless, reason }
}

/// Names with our prefixes that are read by the launcher's children, by tests, or by programs of
/// others.
pub(super) const ELSEWHERE: &[&str] = &[
    "BPS_ENVIRONMENT_CHECKED",
    "BPS_BLESS",
    "BPS_TEST_RDMA_ONLY",
    "DMLC_JOB_CLUSTER",
    "DMLC_NUM_ATTEMPT",
    "DMLC_TASK_ID",
];

/// The entry for this name, if it has one.
pub(super) fn find(name: &str) -> Option<&'static Known> {
    KNOWN.iter().find(|known| known.names.contains(&name))
}

/// All of them, in the order of the documents.
pub(super) static KNOWN: &[Known] = &[
    known(
        &["BYTEPS_THREADPOOL_SIZE"],
        &[],
        "gradients are encoded by the threads that send and sum them, which need no pool",
    ),
    known(
        &["BYTEPS_OMP_THREAD_PER_GPU", "BYTEPS_SERVER_ENGINE_THREAD"],
        &[],
        "a server sums on its polling threads; BPS_SERVER_CORES says how many",
    ),
    known(
        &["BYTEPS_SERVER_ENABLE_SCHEDULE"],
        &["0"],
        "a server sums bytes as they land; workers order them by priority",
    ),
    known(
        &["BYTEPS_SERVER_ENGINE_BLOCKING"],
        &[],
        "a server always sums where the bytes land, without a queue",
    ),
    known(
        &[
            "BYTEPS_SERVER_DEBUG",
            "BYTEPS_SERVER_DEBUG_KEY",
            "BYTEPS_DEBUG_SAMPLE_TENSOR",
            "PS_KEY_LOG",
            "PS_VERBOSE",
            "BYTEPS_PRINT_RDMA_LOG",
        ],
        &["0"],
        "the data path logs nothing; BPS_LOG_LEVEL=debug tells the rest",
    ),
    known(
        &["BYTEPS_SOCKET_PATH"],
        &[],
        "the processes of a host share no socket in the file system",
    ),
    known(&["BYTEPS_LOG_HIDE_TIME"], &["0"], "log lines have one form"),
    known(&["BYTEPS_TELEMETRY_ON"], &["1"], "throughput is always measured; it costs nothing"),
    known(
        &["ENABLE_PROFILING", "PROFILE_PATH"],
        &["0"],
        "BYTEPS_TRACE_ON=1 records a timeline of ranks and servers",
    ),
    known(
        &["DMLC_ENABLE_UCX"],
        &["0"],
        "lanes use TCP, shared memory or RDMA verbs (BPS_TRANSPORT)",
    ),
    known(
        &["DMLC_GROUP_SIZE", "DMLC_NUM_PORTS", "DMLC_NUM_CPU_DEV", "DMLC_NUM_GPU_DEV"],
        &["1", "0"],
        "every server core has its own port, BPS_SERVER_CORES of them",
    ),
    known(
        &["DMLC_LOCAL", "BYTEPS_ENABLE_IPC"],
        &["0"],
        "servers of the same host are reached through shared memory by themselves (BPS_TRANSPORT)",
    ),
    known(
        &["BYTEPS_IPC_COPY_NUM_THREADS", "BYTEPS_IPC_ENABLE_ASYNC_COPY"],
        &[],
        "shared memory needs no copying threads",
    ),
    known(
        &["DMLC_USE_KUBERNETES"],
        &["0"],
        "the scheduler listens on DMLC_PS_ROOT_URI; set that to 0.0.0.0 on the scheduler to \
         listen on all",
    ),
    known(
        &["DMLC_LOCKLESS_QUEUE", "DMLC_POLLING_IN_NANOSECOND"],
        &[],
        "all queues are lock-free; BPS_IDLE says how threads wait",
    ),
    known(
        &["PS_RESEND", "PS_RESEND_TIMEOUT", "PS_DROP_MSG"],
        &["0"],
        "connections are reliable; nothing is sent twice",
    ),
    known(&["BYTEPS_ZMQ_MAX_SOCKET", "BYTEPS_ZMQ_NTHREADS"], &[], "ZeroMQ is not used"),
    known(
        &[
            "BYTEPS_RDMA_START_DEPTH",
            "BYTEPS_RDMA_RX_DEPTH",
            "BYTEPS_RDMA_MAX_CONCURR_WR",
            "BYTEPS_ADDRESS_POOL_SIZE",
        ],
        &[],
        "queues and registered memory follow the lanes; see docs/rdma.md",
    ),
    known(
        &["BYTEPS_ORDERED_HOSTS"],
        &[],
        "ranks follow from DMLC_WORKER_ID, and DMLC_RANK asks for a server's index",
    ),
    known(
        &[
            "BYTEPS_UCX_SHORT_THRESH",
            "BYTEPS_UCX_ERRH_ENABLE",
            "BYTEPS_UCX_RECONNECT_TMO",
            "BYTEPS_UCX_FORCE_REQ_ORDER",
            "BYTEPS_UCX_QUEUE_SENDS",
            "PSLITE_UCX_USE_MT_MUTEX",
            "PSLITE_UCX_SOCKADDR_CM_ENABLE",
            "PSLITE_UCX_RNDV_THRESH",
            "PSLITE_UCX_IB_TRAFFIC_CLASS",
        ],
        &[],
        "UCX is not used",
    ),
    known(
        &[
            "BYTEPS_NCCL_HOME",
            "BYTEPS_NCCL_LINK",
            "BYTEPS_CUDA_HOME",
            "BYTEPS_CUDA_INCLUDE",
            "BYTEPS_CUDA_LIB",
            "BYTEPS_WITH_TENSORFLOW",
            "BYTEPS_WITH_PYTORCH",
            "BYTEPS_WITH_MXNET",
            "BYTEPS_WITHOUT_TENSORFLOW",
            "BYTEPS_WITHOUT_PYTORCH",
            "BYTEPS_WITHOUT_MXNET",
            "BYTEPS_WITH_UCX",
            "BYTEPS_UCX_HOME",
            "BYTEPS_UCX_PREFIX",
            "BYTEPS_UCX_TARBALL_PATH",
            "BYTEPS_WITHOUT_PRESETUP",
            "BYTEPS_USE_MPI",
            "BYTEPS_MPICXX_SHOW",
        ],
        &[],
        "the wheel is built without frameworks, CUDA and NCCL; nothing is chosen at build time",
    ),
    known(
        &["BYTEPS_JOB_ID", "BYTEPS_NUMA_ID", "BYTEPS_NUM_NODES", "BYTEPS_NODE_ID"],
        &[],
        "a variable of a BytePS branch; jobs share no names here, and hosts are DMLC_NUM_WORKER \
         and DMLC_WORKER_ID",
    ),
    known(
        &["BYTEPS_FORCE_JOINT_MODE", "BYTEPS_WORKER_LOCAL_ROOT", "BYTEPS_SERVER_LOCAL_ROOT"],
        &[],
        "a variable of a BytePS branch; workers and servers are processes of their own, and no \
         rank is a root",
    ),
    known(
        &["BYTEPS_MONITOR_INTERVAL", "BYTEPS_ABORT_ON_TIMEOUT", "BYTEPS_ENABLE_ERR_HANDLING"],
        &[],
        "a variable of a BytePS branch; stalls and deaths are always reported (BPS_STALL_REPORT, \
         BPS_STALL_TIMEOUT)",
    ),
    known(
        &["BYTEPS_CPU_ONLY"],
        &["0", "1"],
        "a variable of a BytePS branch; CPU tensors always work",
    ),
    known(
        &["BYTESCHEDULER_ROOT_IP", "BYTESCHEDULER_ROOT_PORT"],
        &[],
        "it was the address of ByteScheduler's tuner, which the scheduler is here; ranks meet at \
         DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT",
    ),
    known(
        &[
            "BYTESCHEDULER_WITH_MXNET",
            "BYTESCHEDULER_WITH_PYTORCH",
            "BYTESCHEDULER_WITHOUT_MXNET",
            "BYTESCHEDULER_WITHOUT_PYTORCH",
        ],
        &[],
        "the wheel is built without frameworks; nothing is chosen at build time",
    ),
];

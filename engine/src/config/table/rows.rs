//! The rows that are neither of GPUs nor the launcher's own, in the order in which the documents
//! list them.

use super::Field::{Bytes, Count, MaybeCount, MaybeText, Path, Port, Seconds, Switch, Text, Wide};
use super::{Group, LAUNCHER, Row, SCHEDULER, SERVER, TOP, WORKER, choices};
use crate::limits::{CORES_MAX, PART_BYTES_MAX, PART_BYTES_MIN, RANKS_MAX, SERVERS_MAX};

pub(super) const ALL: u8 = WORKER | SERVER | SCHEDULER | LAUNCHER;
pub(super) const NODES: u8 = WORKER | SERVER | LAUNCHER;
pub(super) const RANKING: u8 = WORKER | LAUNCHER;

pub(super) const DAY_SECONDS: f64 = 86_400.0;

/// The limits are far below 2^32; the compile-time evaluation of the table proves it for each.
pub(super) const fn count(limit: usize) -> u32 {
    assert!(limit <= u32::MAX as usize);
    #[allow(clippy::cast_possible_truncation, reason = "asserted in the line above")]
    {
        limit as u32
    }
}

/// Every knob but those of GPUs and those that only the launcher has.
pub(super) const ROWS: &[Row] = &[
    Row::new(
        "DMLC_ROLE",
        ALL,
        Group::Job,
        choices::ROLE,
        "server",
        "What this process is. Our own programs know it; bpslaunch and byteps.server read it.",
    ),
    Row::new(
        "DMLC_NUM_WORKER",
        ALL,
        Group::Job,
        Count { at: |config| &mut config.num_workers, min: 1, max: count(RANKS_MAX) },
        "2",
        "Worker hosts of the job (machines, not processes).",
    )
    .flag("workers"),
    Row::new(
        "DMLC_NUM_SERVER",
        ALL,
        Group::Job,
        Count { at: |config| &mut config.num_servers, min: 0, max: count(SERVERS_MAX) },
        "2",
        "Server processes of the job. With --local: how many to start, 1 unless the flag says \
         otherwise. With --hosts the flag may also say where, as cpu1:8,cpu2:8 (8 cores each).",
    )
    .flag("servers")
    .or_text(|config| &mut config.launch.server_hosts),
    Row::new(
        "DMLC_WORKER_ID",
        RANKING,
        Group::Job,
        Count { at: |config| &mut config.worker_id, min: 0, max: count(RANKS_MAX) - 1 },
        "0",
        "Index of this worker host, from 0.",
    )
    .flag("worker-id"),
    Row::new(
        "BYTEPS_LOCAL_RANK",
        WORKER,
        Group::Job,
        Count { at: |config| &mut config.local_rank, min: 0, max: count(RANKS_MAX) - 1 },
        "0",
        "Index of this worker process on its host, from 0. bpslaunch sets it.",
    ),
    Row::new(
        "BYTEPS_LOCAL_SIZE",
        RANKING | SCHEDULER,
        Group::Job,
        Count { at: |config| &mut config.local_size, min: 1, max: count(RANKS_MAX) },
        "8",
        "Worker processes of this host, the same on every host. bpslaunch starts this many, and \
         sets it.",
    )
    .flag("local-size"),
    Row::new(
        "BYTEPS_GLOBAL_RANK",
        WORKER,
        Group::Job,
        MaybeCount { at: |config| &mut config.global_rank, max: count(RANKS_MAX) - 1 },
        "3",
        "Rank of this process in the job, instead of worker id x local size + local rank.",
    ),
    Row::new(
        "BYTEPS_FORCE_DISTRIBUTED",
        RANKING,
        Group::Job,
        Switch { at: |config| &mut config.force_distributed },
        "1",
        "Go through servers even with a single worker process, or where all are on one host. The \
         same on every worker.",
    )
    .flag("force-distributed"),
    Row::new(
        "BPS_JOB_KEY",
        ALL,
        Group::Job,
        MaybeText { at: |config| &mut config.job_key },
        "6b86b273ff34fce19d6b804eff5a3f5747ada4eaa22f1d49c01e52ddb7875b4b",
        "Secret of the job in hexadecimal, 16 to 64 bytes. With it, both ends of every connection \
         prove that they know it before anything else is read, and all that passes between nodes \
         and scheduler is encrypted. It has no flag: command lines are public.",
    )
    .secret(),
    Row::new(
        "BPS_JOB_KEY_FILE",
        ALL,
        Group::Job,
        Path { at: |config| &mut config.job_key_file },
        "job.key",
        "A file that holds the secret of the job, and that other users cannot read; instead of \
         BPS_JOB_KEY.",
    )
    .flag("job-key-file"),
    Row::new(
        "BPS_ENCRYPT",
        ALL,
        Group::Job,
        Switch { at: |config| &mut config.encrypt },
        "1",
        "Whether gradients are encrypted and authenticated between hosts, as all that passes \
         between nodes and scheduler is in a job with a key. The same on every node; needs a job \
         key, and TCP: there are no RDMA lanes then.",
    )
    .flag("encrypt"),
    Row::new(
        "BPS_STAY",
        SCHEDULER,
        Group::Job,
        Switch { at: |config| &mut config.stays },
        "1",
        "Whether the scheduler, and with it the servers, stay when all ranks have shut down, \
         because they may call init again, until SIGUSR1 says that none will or SIGTERM ends it. \
         bpslaunch does so for the jobs of one machine.",
    )
    .flag("stay"),
    Row::new(
        "BPS_ELASTIC",
        SCHEDULER | LAUNCHER,
        Group::Job,
        choices::ELASTIC,
        "redo",
        "What happens when a rank or a server dies. none: the job ends. redo: the scheduler forms \
         it again from whoever is left and comes back. shrink: rounds go on without a server, a \
         rank alone on its host, or a whole host, and the program need not know; else as redo.",
    )
    .flag("elastic"),
    Row::new(
        "BPS_MIN_WORKERS",
        SCHEDULER | LAUNCHER,
        Group::Job,
        MaybeCount { at: |config| &mut config.min_workers, max: count(RANKS_MAX) },
        "2",
        "Fewest ranks (processes) with which an elastic job goes on; 1 if unset.",
    )
    .flag("min-workers"),
    Row::new(
        "BPS_ELASTIC_WAIT",
        SCHEDULER | LAUNCHER,
        Group::Job,
        Seconds { at: |config| &mut config.elastic_wait, min: 0.0, max: DAY_SECONDS },
        "600",
        "How long an elastic job that has too few ranks left, or no server, waits for new ones \
         before it ends.",
    )
    .flag("elastic-wait"),
    Row::new(
        "BPS_SCHEDULER_WAIT",
        ALL,
        Group::Job,
        Seconds { at: |config| &mut config.scheduler_wait, min: 0.0, max: DAY_SECONDS },
        "120",
        "How long ranks and servers of an elastic job whose scheduler is lost train on and wait \
         for another one on the same address before they end; 0: not at all.",
    )
    .flag("scheduler-wait"),
    Row::new(
        "DMLC_PS_ROOT_URI",
        ALL | TOP,
        Group::Network,
        Text { at: |config| &mut config.root_uri },
        "10.0.0.1",
        "Address of the scheduler; the scheduler itself listens on it.",
    )
    .flag("root-uri"),
    Row::new(
        "DMLC_PS_ROOT_PORT",
        ALL,
        Group::Network,
        Port { at: |config| &mut config.root_port },
        "9000",
        "Port of the scheduler. Only the scheduler itself takes 0: the kernel then chooses.",
    )
    .flag("root-port"),
    Row::new(
        "DMLC_INTERFACE",
        ALL,
        Group::Network,
        MaybeText { at: |config| &mut config.interface },
        "eth0",
        "Network interface to listen on, by the beginning of its name; otherwise the one that \
         reaches \
         the scheduler.",
    )
    .flag("interface"),
    Row::new(
        "DMLC_NODE_HOST",
        ALL,
        Group::Network,
        MaybeText { at: |config| &mut config.node_host },
        "10.0.0.2",
        "Address of this host that the others should use, instead of the interface's.",
    )
    .flag("node-host"),
    Row::new(
        "DMLC_PORT",
        NODES,
        Group::Network,
        Port { at: |config| &mut config.port },
        "9100",
        "First port to listen on: core i of a server listens on this + i. 0 lets the kernel \
         choose.",
    )
    .flag("port"),
    Row::new(
        "DMLC_RANK",
        SERVER | LAUNCHER,
        Group::Network,
        MaybeCount { at: |config| &mut config.preferred_rank, max: count(SERVERS_MAX) - 1 },
        "0",
        "Index that this server would like to have among the servers.",
    )
    .flag("preferred-rank"),
    Row::new(
        "BPS_LOCAL_REDUCE",
        RANKING,
        Group::Network,
        Switch { at: |config| &mut config.local_reduce },
        "0",
        "Whether the ranks of a host reduce among themselves, through shared memory, before one of \
         them speaks to a server for all. The same on every worker. Where all ranks are on one \
         host, servers then have nothing to do, unless BYTEPS_FORCE_DISTRIBUTED is set.",
    )
    .flag("local-reduce"),
    Row::new(
        "DMLC_ENABLE_RDMA",
        NODES,
        Group::Network,
        choices::ENABLE_RDMA,
        "1",
        "1 or ibverbs demands RDMA, as BPS_TRANSPORT=rdma does. 0 forbids nothing: by itself RDMA \
         is used where both ends have it.",
    ),
    Row::new(
        "BPS_TRANSPORT",
        NODES,
        Group::Network,
        choices::TRANSPORT,
        "tcp",
        "How workers reach servers: shared memory on the same host, else RDMA where both ends have \
         it, else TCP (auto), or always one.",
    )
    .flag("transport"),
    Row::new(
        "BPS_RDMA_ON_DEMAND",
        NODES,
        Group::Network,
        Switch { at: |config| &mut config.rdma_on_demand },
        "1",
        "Whether tensors are sent from where they lie, without a copy, by RDMA devices that page \
         on demand. Never run on hardware so far: see docs/rdma.md.",
    ),
    Row::new(
        "BPS_TCP_DRIVER",
        NODES,
        Group::Network,
        choices::TCP_DRIVER,
        "poll",
        "How TCP talks to the kernel: io_uring where it is allowed (auto), io_uring or an error, \
         or plain \
         non-blocking calls.",
    )
    .flag("tcp-driver"),
    Row::new(
        "BPS_TCP_CONGESTION",
        NODES,
        Group::Network,
        MaybeText { at: |config| &mut config.tcp_congestion },
        "dctcp",
        "Congestion control of TCP lanes, one that the kernel allows; otherwise the system's, but \
         cubic where that is bbr, whose probing leaves a tenth of a line unused.",
    )
    .flag("tcp-congestion"),
    Row::new(
        "BPS_TCP_OFFLOAD",
        NODES,
        Group::Network,
        Switch { at: |config| &mut config.tcp_offload },
        "1",
        "Whether io_uring hands large sends to threads of the kernel, beside the thread that \
         receives: for links of 20 Gbit/s and more, where CPUs are plenty.",
    ),
    Row::new(
        "BPS_TCP_SNDBUF",
        NODES,
        Group::Network,
        Count { at: |config| &mut config.tcp_send_buffer, min: 0, max: 1 << 30 },
        "524288",
        "Bytes that the kernel may hold of each TCP lane, sent and not acknowledged included; 0 \
         leaves it to the kernel, which fills whatever queue a switch has. On paths with short \
         round trips a bound keeps that queue, and with it the wait of urgent parts, short; \
         net.core.wmem_max is the kernel's own bound on it.",
    ),
    Row::new(
        "BPS_PAYLOAD_CHECKSUM",
        NODES,
        Group::Network,
        choices::PAYLOAD_CHECKSUM,
        "1",
        "Which payloads carry a CRC-32C: those over TCP to other hosts (auto), all (1) or none \
         (0). TCP's own checksum has 16 bits and is computed anew on the way; RDMA's has 32, from \
         end to end, and shared memory and loopback pass no device.",
    )
    .flag("payload-checksum"),
    Row::new(
        "BYTEPS_PARTITION_BYTES",
        ALL,
        Group::Tensors,
        Bytes {
            at: |config| &mut config.partition_bytes,
            min: count(PART_BYTES_MIN),
            max: count(PART_BYTES_MAX),
        },
        "4M",
        "Largest part of a tensor, a multiple of 64. The default is smaller than BytePS's \
         4096000: many parts share the links more evenly, and the last one is back sooner. Small \
         tensors of servers, on no GPU and not encoded, have about four parts for each server.",
    )
    .flag("partition-bytes"),
    Row::new(
        "BYTEPS_MIN_COMPRESS_BYTES",
        RANKING,
        Group::Tensors,
        Bytes { at: |config| &mut config.min_compress_bytes, min: 0, max: u32::MAX },
        "64K",
        "Tensors of fewer bytes are not encoded, whatever they are declared with: they are few of \
         the bytes, and have much to lose. The same on all ranks.",
    ),
    Row::new(
        "BYTEPS_ENABLE_ASYNC",
        RANKING,
        Group::Tensors,
        Switch { at: |config| &mut config.enable_async },
        "1",
        "Asynchronous training: DistributedOptimizer keeps parameters on the servers unless it is \
         told otherwise, and all tensors go through servers. The same on every worker.",
    ),
    Row::new(
        "BPS_STALENESS",
        RANKING,
        Group::Tensors,
        MaybeCount { at: |config| &mut config.staleness, max: 1 << 20 },
        "8",
        "How many steps a rank may be ahead of the slowest in asynchronous training; without a \
         bound if unset. The same on every worker.",
    ),
    Row::new(
        "BYTEPS_SCHEDULING_CREDIT",
        RANKING,
        Group::Tensors,
        Count { at: |config| &mut config.scheduling_credit, min: 0, max: 65_536 },
        "4",
        "Partitions that a worker process may have in flight, that is, handed to the network \
         and not taken by it; 0 allows one for each server core, and four at least. Unlike in \
         BytePS, \
         priorities hold in any case.",
    )
    .flag("scheduling-credit"),
    Row::new(
        "BYTEPS_KEY_HASH_FN",
        SCHEDULER | LAUNCHER,
        Group::Tensors,
        choices::PLACEMENT,
        "djb2",
        "Which server core gets a part: the one with the fewest bytes (balanced), or one of \
         BytePS's \
         functions. BytePS's default is djb2. The scheduler decides for all.",
    )
    .flag("placement"),
    Row::new(
        "BYTEPS_ENABLE_MIXED_MODE",
        SCHEDULER | LAUNCHER,
        Group::Tensors,
        choices::MIXED_MODE,
        "1",
        "BytePS's way to say BYTEPS_KEY_HASH_FN=mixed: the best split between servers on worker \
         hosts and \
         servers on hosts of their own.",
    ),
    Row::new(
        "BYTEPS_MIXED_MODE_BOUND",
        SCHEDULER | LAUNCHER,
        Group::Tensors,
        Count { at: |config| &mut config.mixed_bound, min: 1, max: 65_536 },
        "101",
        "Number of buckets of mixed mode; not below the number of servers.",
    )
    .flag("mixed-mode-bound"),
    Row::new(
        "BYTEPS_BUILT_IN_HASH_COEF",
        SCHEDULER | LAUNCHER,
        Group::Tensors,
        Wide { at: |config| &mut config.built_in_coefficient },
        "1",
        "Factor of the built_in function.",
    )
    .flag("built-in-hash-coefficient"),
    Row::new(
        "BPS_SERVER_CORES",
        SERVER | LAUNCHER,
        Group::Threads,
        Count { at: |config| &mut config.server_cores, min: 1, max: count(CORES_MAX) },
        "2",
        "Polling threads of a server, each with keys, memory and connections of its own.",
    )
    .flag("cores")
    .flag_alias("server-cores"),
    Row::new(
        "BPS_IDLE",
        NODES,
        Group::Threads,
        choices::IDLE,
        "busy",
        "What a polling thread without work does: spin briefly and sleep (adaptive), or never \
         sleep (busy, \
         for cores that nothing else uses).",
    )
    .flag("idle"),
    Row::new(
        "BPS_PIN",
        NODES,
        Group::Threads,
        Switch { at: |config| &mut config.pin },
        "0",
        "Pin polling threads to cores.",
    )
    .flag("pin"),
    Row::new(
        "BPS_START_TIMEOUT",
        ALL,
        Group::Limits,
        Seconds { at: |config| &mut config.start_timeout, min: 0.1, max: DAY_SECONDS },
        "60",
        "How long to wait for the other nodes at start.",
    )
    .flag("start-timeout"),
    Row::new(
        "BPS_STALL_REPORT",
        ALL,
        Group::Limits,
        Seconds { at: |config| &mut config.stall_report, min: 0.1, max: DAY_SECONDS },
        "2.5",
        "A round that some ranks have pushed and others have not is reported after this long.",
    )
    .flag("stall-report"),
    Row::new(
        "BPS_STALL_TIMEOUT",
        ALL,
        Group::Limits,
        Seconds { at: |config| &mut config.stall_timeout, min: 0.1, max: 30.0 * DAY_SECONDS },
        "600",
        "A round that stays open for this long is an error on every rank.",
    )
    .flag("stall-timeout"),
    Row::new(
        "BPS_HEARTBEAT_INTERVAL",
        ALL,
        Group::Limits,
        Seconds { at: |config| &mut config.heartbeat_interval, min: 0.05, max: 3600.0 },
        "0.5",
        "How often a node says that it lives. Unlike in BytePS it cannot be 0, which was off.",
    )
    .aliases(&["PS_HEARTBEAT_INTERVAL"])
    .flag("heartbeat-interval"),
    Row::new(
        "BPS_HEARTBEAT_TIMEOUT",
        ALL,
        Group::Limits,
        Seconds { at: |config| &mut config.heartbeat_timeout, min: 0.1, max: DAY_SECONDS },
        "4",
        "A node whose heartbeat is overdue for this long counts as dead, and so does a scheduler \
         that does not answer; at least twice the interval.",
    )
    .aliases(&["PS_HEARTBEAT_TIMEOUT"])
    .flag("heartbeat-timeout"),
    Row::new(
        "BPS_LOG_LEVEL",
        ALL,
        Group::Output,
        choices::LOG_LEVEL,
        "debug",
        "How much is said on standard error; fatal, warn and trace are error, warning and debug.",
    )
    .aliases(&["BYTEPS_LOG_LEVEL"])
    .flag("log-level"),
    Row::new(
        "BYTEPS_TRACE_ON",
        RANKING,
        Group::Output,
        Switch { at: |config| &mut config.trace_on },
        "1",
        "Record a timeline of this rank and of the servers, in files that Perfetto opens.",
    ),
    Row::new(
        "BYTEPS_TRACE_DIR",
        NODES,
        Group::Output,
        Path { at: |config| &mut config.trace_dir },
        "/tmp/trace",
        "Folder of the timeline: RANK/comm.json for each rank, server-INDEX/comm.json for each \
         server. A server of a job with a job key takes the worker's; else its own.",
    ),
    Row::new(
        "BYTEPS_TRACE_START_STEP",
        RANKING,
        Group::Output,
        Count { at: |config| &mut config.trace_start_step, min: 1, max: u32::MAX },
        "1",
        "First round of each tensor in the timeline; a tensor's first push_pull is round 1.",
    ),
    Row::new(
        "BYTEPS_TRACE_END_STEP",
        RANKING,
        Group::Output,
        Count { at: |config| &mut config.trace_end_step, min: 1, max: u32::MAX },
        "100",
        "Last round of each tensor in the timeline.",
    ),
    Row::new(
        "BPS_METRICS_PORT",
        SCHEDULER | LAUNCHER | TOP,
        Group::Metrics,
        MaybeCount { at: |config| &mut config.metrics_port, max: 65_535 },
        "9100",
        "Where the scheduler shows the metrics of the whole job, over HTTP; nowhere if unset, a \
         port that it announces if 0. With --local a free port is chosen.",
    )
    .flag("metrics-port"),
    Row::new(
        "BPS_SERVER_METRICS_PORT",
        SERVER | LAUNCHER,
        Group::Metrics,
        MaybeCount { at: |config| &mut config.server_metrics_port, max: 65_535 },
        "0",
        "Where a server shows its own metrics; nowhere if unset, a port that it announces if 0. \
         With --local the second server takes the next port, and so on.",
    )
    .flag("server-metrics-port"),
    Row::new(
        "BPS_METRICS_ADDRESS",
        SERVER | SCHEDULER | LAUNCHER | TOP,
        Group::Metrics,
        Text { at: |config| &mut config.metrics_address },
        "0.0.0.0",
        "The address to show them on. Whoever reaches it may read them: there is no password.",
    )
    .flag("metrics-address"),
    Row::new(
        "BPS_LINK_SPEED",
        NODES,
        Group::Metrics,
        MaybeCount { at: |config| &mut config.link_speed, max: 10_000_000 },
        "25000",
        "Speed of this node's network interface in Mbit/s, for the fraction of line rate, where \
         the kernel does not know it or is wrong.",
    )
    .flag("link-speed"),
    Row::new(
        "",
        TOP,
        Group::Metrics,
        Switch { at: |config| &mut config.top.once },
        "1",
        "bps-top: print one table and leave.",
    )
    .flag("once"),
    Row::new(
        "",
        TOP,
        Group::Metrics,
        Seconds { at: |config| &mut config.top.interval, min: 0.1, max: 3600.0 },
        "2",
        "bps-top: time between two looks, over which rates are taken.",
    )
    .flag("interval"),
];

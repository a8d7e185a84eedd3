//! The rows that only the launcher has.

use super::Field::{Count, MaybeText, Seconds, Switch};
use super::rows::{DAY_SECONDS, count};
use super::{Group, LAUNCHER, Row, choices};
use crate::limits::RANKS_MAX;

/// In the order in which the documents list them.
pub(super) const ROWS: &[Row] = &[
    Row::new(
        "",
        LAUNCHER,
        Group::Launcher,
        Count { at: |config| &mut config.launch.local, min: 0, max: count(RANKS_MAX) },
        "2",
        "Stand-alone mode: a whole job with this many workers on this machine. 0 takes the job \
         from DMLC_*.",
    )
    .flag("local"),
    Row::new(
        "",
        LAUNCHER,
        Group::Launcher,
        Switch { at: |config| &mut config.launch.no_prefix },
        "1",
        "Pass the output of the processes through, without [rank i] in front of each line.",
    )
    .flag("no-prefix"),
    Row::new(
        "BPS_LAUNCH_GRACE",
        LAUNCHER,
        Group::Launcher,
        Seconds { at: |config| &mut config.launch.grace, min: 0.0, max: DAY_SECONDS },
        "30",
        "How long a process that was asked to end (SIGTERM) may take before it is killed. Servers \
         that outlive all workers by twice this are ended too.",
    )
    .flag("grace"),
    Row::new(
        "",
        LAUNCHER,
        Group::Launcher,
        Switch { at: |config| &mut config.launch.dry_run },
        "1",
        "Print what would be started, and on which GPUs and CPUs, and leave.",
    )
    .flag("dry-run"),
    Row::new(
        "",
        LAUNCHER,
        Group::Launcher,
        choices::GPUS,
        "demand",
        "GPUs of the worker processes. auto: each gets the GPU of its local rank where there are \
         enough of them. demand: an error where there are not. none: pay no regard to GPUs.",
    )
    .flag("gpus"),
    Row::new(
        "CUDA_VISIBLE_DEVICES",
        LAUNCHER,
        Group::Launcher,
        MaybeText { at: |config| &mut config.launch.cuda_visible },
        "0,1,2,3",
        "CUDA's own variable: the GPUs that processes see, by number or identifier. Empty is none.",
    )
    .keeps_empty(),
    Row::new(
        "CUDA_DEVICE_ORDER",
        LAUNCHER,
        Group::Launcher,
        MaybeText { at: |config| &mut config.launch.cuda_order },
        "PCI_BUS_ID",
        "CUDA's own variable: how it counts GPUs that differ.",
    ),
    Row::new(
        "NVIDIA_VISIBLE_DEVICES",
        LAUNCHER,
        Group::Launcher,
        MaybeText { at: |config| &mut config.launch.visible_devices },
        "0,1,2,3",
        "One worker process for each entry of this list, on these GPUs, unless BYTEPS_LOCAL_SIZE \
         says how many. Without a list, one for each GPU that is visible.",
    ),
    Row::new(
        "BYTEPS_ENABLE_GDB",
        LAUNCHER,
        Group::Launcher,
        Switch { at: |config| &mut config.launch.gdb },
        "1",
        "Run each worker under gdb, which prints a backtrace if it crashes.",
    ),
    Row::new(
        "BYTEPS_NUMA_ON",
        LAUNCHER,
        Group::Launcher,
        Switch { at: |config| &mut config.launch.numa },
        "0",
        "Give each worker process cores of its own, of the NUMA node of its GPU, and memory there. \
         Processes without GPUs get cores of one node where they fit, if they are several and not \
         those of --local.",
    ),
    Row::new(
        "BYTEPS_NUMA_DEFAULT_QUOTA",
        LAUNCHER,
        Group::Launcher,
        Count { at: |config| &mut config.launch.numa_default_quota, min: 0, max: 65_536 },
        "4",
        "Physical cores of each worker process but the last; 0 divides them evenly.",
    ),
    Row::new(
        "BYTEPS_NUMA_ROOT_QUOTA",
        LAUNCHER,
        Group::Launcher,
        Count { at: |config| &mut config.launch.numa_root_quota, min: 0, max: 65_536 },
        "8",
        "Physical cores of the last worker process; 0 takes what is left.",
    ),
    Row::new(
        "BYTEPS_MULTITHREADED_CPU",
        LAUNCHER,
        Group::Launcher,
        Switch { at: |config| &mut config.launch.multithreaded_cpu },
        "0",
        "Add to each core its hyper-thread siblings.",
    ),
    Row::new(
        "BYTEPS_CPU_BLACKLIST",
        LAUNCHER,
        Group::Launcher,
        MaybeText { at: |config| &mut config.launch.cpu_blacklist },
        "0,4-5",
        "CPUs that no worker process gets; BytePS's -1 means none.",
    ),
    Row::new(
        "BYTEPS_VISIBLE_CPU_CORES",
        LAUNCHER,
        Group::Launcher,
        MaybeText { at: |config| &mut config.launch.visible_cpu_cores },
        "0-3:4-7",
        "The CPUs of each worker process, one list a process, separated by colons. It overrides \
         the rest.",
    ),
];

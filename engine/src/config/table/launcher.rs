//! The rows that only the launcher has.

use super::Field::{Count, MaybeText, Path, Port, Seconds, Switch, Text, Texts};
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
        MaybeText { at: |config| &mut config.launch.hosts },
        "host1:4,host2:4",
        "The machines of a job on several, with the ranks of each, which ssh starts. Without a \
         number: one for each GPU there, or one.",
    )
    .flag("hosts")
    .short('H'),
    Row::new(
        "",
        LAUNCHER,
        Group::Launcher,
        Path { at: |config| &mut config.launch.hostfile },
        "hosts.txt",
        "The same from a file: a line for each machine, 'host1 slots=4' or 'host1:4'.",
    )
    .flag("hostfile"),
    Row::new(
        "",
        LAUNCHER,
        Group::Launcher,
        MaybeText { at: |config| &mut config.launch.scheduler_host },
        "host1",
        "With --hosts: the machine of the scheduler. Otherwise this one, if all others reach it, \
         else the first.",
    )
    .flag("scheduler-host"),
    Row::new(
        "",
        LAUNCHER,
        Group::Launcher,
        Texts { at: |config| &mut config.launch.pass },
        "HF_TOKEN",
        "With --hosts: a variable that all processes get beside those of ours, as NAME from here \
         or as NAME=VALUE. May be given several times.",
    )
    .flag("env")
    .short('x')
    .secret(),
    Row::new(
        "",
        LAUNCHER,
        Group::Launcher,
        Path { at: |config| &mut config.launch.chdir },
        "/data/run",
        "With --hosts: the folder in which the processes start, on every machine; otherwise the \
         current one.",
    )
    .flag("chdir"),
    Row::new(
        "",
        LAUNCHER,
        Group::Launcher,
        Port { at: |config| &mut config.launch.ssh_port },
        "2222",
        "With --hosts: the port of ssh; 0 leaves it to ssh and its configuration.",
    )
    .flag("ssh-port"),
    Row::new(
        "",
        LAUNCHER,
        Group::Launcher,
        MaybeText { at: |config| &mut config.launch.ssh_user },
        "train",
        "With --hosts: whom to log in as; user@host in the list beats it.",
    )
    .flag("ssh-user"),
    Row::new(
        "",
        LAUNCHER,
        Group::Launcher,
        Text { at: |config| &mut config.launch.ssh_command },
        "ssh -i key",
        "With --hosts: what is started for each machine, with its name and a command behind it.",
    )
    .flag("ssh-command"),
    Row::new(
        "",
        LAUNCHER,
        Group::Launcher,
        Seconds { at: |config| &mut config.launch.ssh_timeout, min: 1.0, max: DAY_SECONDS },
        "60",
        "With --hosts: how long a machine may take until bpslaunch runs there.",
    )
    .flag("ssh-timeout"),
    Row::new(
        "",
        LAUNCHER,
        Group::Launcher,
        MaybeText { at: |config| &mut config.launch.remote_program },
        "/opt/venv/bin/bpslaunch",
        "With --hosts: bpslaunch on the other machines, where it is not at the same path as here.",
    )
    .flag("remote-program"),
    Row::new(
        "",
        LAUNCHER,
        Group::Launcher,
        Switch { at: |config| &mut config.launch.agent },
        "1",
        "The part of --hosts that runs on each machine, and is told what to do on standard input. \
         bpslaunch starts it by itself.",
    )
    .flag("agent"),
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

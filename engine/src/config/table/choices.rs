//! The fields whose value is one of a few words.

use super::Field;
use crate::base::Placement;
use crate::config::{
    AutoCompression, ElasticMode, GpuDirect, Gpus, Idle, LogLevel, PayloadChecksum, Role,
    TcpDriver, TransportChoice,
};

pub(super) const ROLE: Field = Field::Choice {
    names: "worker, server, scheduler",
    set: |config, text| {
        config.role = match text {
            "worker" => Role::Worker,
            "server" => Role::Server,
            "scheduler" => Role::Scheduler,
            _ => return false,
        };
        true
    },
    get: |config| match config.role {
        Role::Worker => "worker",
        Role::Server => "server",
        Role::Scheduler => "scheduler",
    },
};

pub(super) const TRANSPORT: Field = Field::Choice {
    names: "auto, tcp, shm, rdma",
    set: |config, text| {
        config.transport = match text {
            "auto" => TransportChoice::Auto,
            "tcp" => TransportChoice::Tcp,
            "shm" => TransportChoice::Shm,
            "rdma" => TransportChoice::Rdma,
            _ => return false,
        };
        true
    },
    get: |config| match config.transport {
        TransportChoice::Auto => "auto",
        TransportChoice::Tcp => "tcp",
        TransportChoice::Shm => "shm",
        TransportChoice::Rdma => "rdma",
    },
};

pub(super) const ENABLE_RDMA: Field = Field::Choice {
    names: "0, 1, false, true, zmq, ibverbs",
    set: |config, text| match text {
        "1" | "true" | "ibverbs" => {
            config.transport = TransportChoice::Rdma;
            true
        }
        "0" | "false" | "zmq" => true,
        _ => false,
    },
    get: |config| if config.transport == TransportChoice::Rdma { "1" } else { "0" },
};

pub(super) const ELASTIC: Field = Field::Choice {
    names: "none, redo, shrink",
    set: |config, text| {
        config.elastic = match text {
            "none" => ElasticMode::None,
            "redo" => ElasticMode::Redo,
            "shrink" => ElasticMode::Shrink,
            _ => return false,
        };
        true
    },
    get: |config| match config.elastic {
        ElasticMode::None => "none",
        ElasticMode::Redo => "redo",
        ElasticMode::Shrink => "shrink",
    },
};

pub(super) const TCP_DRIVER: Field = Field::Choice {
    names: "auto, uring, poll",
    set: |config, text| {
        config.tcp_driver = match text {
            "auto" => TcpDriver::Auto,
            "uring" => TcpDriver::Uring,
            "poll" => TcpDriver::Poll,
            _ => return false,
        };
        true
    },
    get: |config| match config.tcp_driver {
        TcpDriver::Auto => "auto",
        TcpDriver::Uring => "uring",
        TcpDriver::Poll => "poll",
    },
};

pub(super) const PAYLOAD_CHECKSUM: Field = Field::Choice {
    names: "auto, 0, 1, false, true",
    set: |config, text| {
        config.payload_checksum = match text {
            "auto" => PayloadChecksum::Auto,
            "1" | "true" => PayloadChecksum::Always,
            "0" | "false" => PayloadChecksum::Never,
            _ => return false,
        };
        true
    },
    get: |config| match config.payload_checksum {
        PayloadChecksum::Auto => "auto",
        PayloadChecksum::Always => "1",
        PayloadChecksum::Never => "0",
    },
};

pub(super) const AUTO_COMPRESSION: Field = Field::Choice {
    names: "measured, none, bf16, codec",
    set: |config, text| {
        config.auto_compression = match text {
            "measured" => AutoCompression::Measured,
            "none" => AutoCompression::None,
            "bf16" => AutoCompression::Bf16,
            "codec" => AutoCompression::Codec,
            _ => return false,
        };
        true
    },
    get: |config| match config.auto_compression {
        AutoCompression::Measured => "measured",
        AutoCompression::None => "none",
        AutoCompression::Bf16 => "bf16",
        AutoCompression::Codec => "codec",
    },
};

pub(super) const GPUDIRECT: Field = Field::Choice {
    names: "auto, demand, none",
    set: |config, text| {
        config.gpudirect = match text {
            "auto" => GpuDirect::Auto,
            "demand" => GpuDirect::Demand,
            "none" => GpuDirect::None,
            _ => return false,
        };
        true
    },
    get: |config| match config.gpudirect {
        GpuDirect::Auto => "auto",
        GpuDirect::Demand => "demand",
        GpuDirect::None => "none",
    },
};

pub(super) const GPUS: Field = Field::Choice {
    names: "auto, demand, none",
    set: |config, text| {
        config.launch.gpus = match text {
            "auto" => Gpus::Auto,
            "demand" => Gpus::Demand,
            "none" => Gpus::None,
            _ => return false,
        };
        true
    },
    get: |config| match config.launch.gpus {
        Gpus::Auto => "auto",
        Gpus::Demand => "demand",
        Gpus::None => "none",
    },
};

pub(super) const PLACEMENT: Field = Field::Choice {
    names: "balanced, naive, built_in, djb2, sdbm, mixed",
    set: |config, text| {
        config.placement = match text {
            "balanced" => Placement::Balanced,
            "naive" => Placement::Naive,
            "built_in" => Placement::BuiltIn,
            "djb2" => Placement::Djb2,
            "sdbm" => Placement::Sdbm,
            "mixed" => Placement::Mixed,
            _ => return false,
        };
        true
    },
    get: |config| match config.placement {
        Placement::Balanced => "balanced",
        Placement::Naive => "naive",
        Placement::BuiltIn => "built_in",
        Placement::Djb2 => "djb2",
        Placement::Sdbm => "sdbm",
        Placement::Mixed => "mixed",
    },
};

pub(super) const MIXED_MODE: Field = Field::Choice {
    names: "0, 1, false, true",
    set: |config, text| match text {
        "1" | "true" => {
            config.placement = Placement::Mixed;
            true
        }
        "0" | "false" => true,
        _ => false,
    },
    get: |config| if config.placement == Placement::Mixed { "1" } else { "0" },
};

pub(super) const IDLE: Field = Field::Choice {
    names: "adaptive, busy",
    set: |config, text| {
        config.idle = match text {
            "adaptive" => Idle::Adaptive,
            "busy" => Idle::Busy,
            _ => return false,
        };
        true
    },
    get: |config| match config.idle {
        Idle::Adaptive => "adaptive",
        Idle::Busy => "busy",
    },
};

pub(super) const NIC_HELPERS: Field = Field::Choice {
    names: "auto, 0, 1, 2, 3",
    set: |config, text| {
        config.nic_helpers = match text {
            "auto" => None,
            "0" => Some(0),
            "1" => Some(1),
            "2" => Some(2),
            "3" => Some(3),
            _ => return false,
        };
        true
    },
    get: |config| match config.nic_helpers {
        None => "auto",
        Some(0) => "0",
        Some(1) => "1",
        Some(2) => "2",
        Some(_) => "3",
    },
};

pub(super) const LOG_LEVEL: Field = Field::Choice {
    names: "error, warning, info, debug",
    set: |config, text| {
        config.log_level = match text {
            "error" | "fatal" => LogLevel::Error,
            "warning" | "warn" => LogLevel::Warning,
            "info" => LogLevel::Info,
            "debug" | "trace" => LogLevel::Debug,
            _ => return false,
        };
        true
    },
    get: |config| match config.log_level {
        LogLevel::Error => "error",
        LogLevel::Warning => "warning",
        LogLevel::Info => "info",
        LogLevel::Debug => "debug",
    },
};

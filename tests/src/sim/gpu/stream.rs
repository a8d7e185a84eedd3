//! Streams of a simulated GPU, and what is in them.

use super::memory::{Clock, Memory, POISON, STREAMS_MAX};
use bps_fake_gpu::kernels::{self, Coding, Launch};
use std::collections::VecDeque;

/// A piece of work.
pub(super) enum Work {
    /// A kernel of a framework writes these bytes.
    Fill {
        at: u64,
        bytes: Vec<u8>,
    },
    /// A kernel of a framework reads.
    Take {
        at: u64,
        bytes: usize,
        number: usize,
    },
    /// Copies, each perhaps by a kernel that encodes or decodes; what is read is kept from the
    /// start, encoded where it is to be, and `seen` is what a source in the host's
    /// memory was when the copy was enqueued, or when it began if its stream waited for the host.
    ToHost {
        host: usize,
        from: u64,
        bytes: Vec<u8>,
        kernel: Option<Coding>,
        /// What the kernel leaves in the place of what it has read, if it does.
        rest: Vec<u8>,
    },
    /// A kernel of the engine's of what is kept between rounds, and what it writes where.
    Kernel {
        launch: Launch,
        results: Vec<(u64, Vec<u8>)>,
    },
    ToDevice {
        to: (u64, usize),
        host: (usize, usize),
        seen: Option<Vec<u8>>,
        kernel: Option<Coding>,
    },
    OnDevice {
        to: u64,
        from: u64,
        bytes: Vec<u8>,
    },
    /// Writes a word of the host's memory.
    Write {
        at: usize,
        value: u32,
    },
    /// Waits until a word of the host's memory is so large.
    Await {
        at: usize,
        value: u32,
    },
    Record {
        mark: usize,
    },
    Wait {
        mark: usize,
    },
    /// The call of this number on a communicator.
    Collective {
        comm: usize,
        call: usize,
    },
}

/// Work in its stream.
pub(super) struct Enqueued {
    pub(super) number: u64,
    /// For messages.
    pub(super) what: &'static str,
    /// What it comes behind.
    pub(super) clock: Clock,
    pub(super) work: Work,
}

pub(super) struct Stream {
    pub(super) device: usize,
    /// Its number among those of the device.
    pub(super) number: usize,
    pub(super) queue: VecDeque<Enqueued>,
    /// The first of the queue is at work.
    pub(super) is_running: bool,
    /// What is at work waits for a rank that is gone.
    pub(super) is_stuck: bool,
    /// Behind what the next work will come.
    pub(super) knows: Clock,
    pub(super) issued: u64,
    /// What comes next is behind a wait for the host.
    pub(super) awaits_host: usize,
    /// How many times longer its work takes than others'.
    pub(super) pace: u64,
}

impl Stream {
    pub(super) fn new(device: usize, number: usize, pace: u64) -> Stream {
        assert!(number < STREAMS_MAX, "a device has few streams");
        Stream {
            device,
            number,
            queue: VecDeque::new(),
            is_running: false,
            is_stuck: false,
            knows: [0; STREAMS_MAX],
            issued: 0,
            awaits_host: 0,
            pace,
        }
    }
}

/// What was recorded of an event.
pub(super) struct Mark {
    pub(super) is_done: bool,
    pub(super) clock: Clock,
}

/// What a kernel of what is kept between rounds writes, and where, of which nobody may read
/// anything until it is done; none if it uses memory that was given back.
pub(super) fn computed(launch: Launch, memory: &mut Memory) -> Option<Vec<(u64, Vec<u8>)>> {
    let results = match launch {
        Launch::Codec(_) => return None,
        Launch::Gather(of) => {
            let length = of.values_bytes();
            let tensor = memory.bytes(of.tensor, of.tensor_bytes())?.to_vec();
            let values = memory.bytes(of.values, length)?.to_vec();
            let velocity = match of.velocity {
                0 => Vec::new(),
                at => memory.bytes(at, length)?.to_vec(),
            };
            let (values, velocity) = of.gather(&tensor, &values, &velocity);
            let velocity = (of.velocity != 0).then_some((of.velocity, velocity));
            [(of.values, values)].into_iter().chain(velocity).collect()
        }
        Launch::Scale { elements, values, factor } => {
            let before = memory.bytes(values, elements * size_of::<f32>())?.to_vec();
            vec![(values, kernels::scaled(&before, factor))]
        }
    };
    for (at, bytes) in &results {
        memory.bytes(*at, bytes.len())?.fill(POISON);
    }
    Some(results)
}

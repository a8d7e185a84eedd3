//! What the environment says of the fake, read once, and a source of small random numbers.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

pub struct Settings {
    /// Numbers of the GPUs that the process sees.
    pub visible: Vec<u32>,
    pub seed: u64,
    pub delay_us: u64,
    /// Pieces of work that a stream has room for.
    pub depth: usize,
    pub pinned_only: bool,
    pub cuda_version: i32,
    pub nccl_version: i32,
    /// Channels that each communicator is to be made with; none where NCCL is to choose.
    pub nccl_channels: Option<i32>,
    /// Whether memory is exported as dma-buf: 0, no; 1, and what devices write there is in order;
    /// 2, and it must be flushed; 3, and it is neither in order nor can it be flushed.
    pub dma_buf: u32,
    failures: Vec<Failure>,
}

/// A call that shall fail.
struct Failure {
    call: String,
    code: u32,
    /// The first call that fails, from 1.
    first: u32,
    calls: AtomicU32,
}

fn number<T: std::str::FromStr>(variable: &str, otherwise: T) -> T {
    match std::env::var(variable) {
        Ok(text) => text.parse().unwrap_or_else(|_| {
            eprintln!("fake GPU: {variable}={text} is no number; it is ignored");
            otherwise
        }),
        Err(_) => otherwise,
    }
}

pub fn settings() -> &'static Settings {
    static SETTINGS: OnceLock<Settings> = OnceLock::new();
    SETTINGS.get_or_init(|| {
        let count = number("FAKE_GPU_COUNT", 4);
        // As in CUDA, the list ends at the first entry that is no GPU.
        let visible = match std::env::var("CUDA_VISIBLE_DEVICES") {
            Ok(list) => list
                .split(',')
                .map_while(|entry| entry.trim().parse().ok().filter(|&gpu: &u32| gpu < count))
                .collect(),
            Err(_) => (0..count).collect(),
        };
        let failures = std::env::var("FAKE_GPU_FAIL").unwrap_or_default();
        Settings {
            visible,
            seed: number("FAKE_GPU_SEED", 1),
            delay_us: number("FAKE_GPU_DELAY_US", 200),
            depth: number("FAKE_GPU_DEPTH", usize::MAX),
            pinned_only: number("FAKE_GPU_PINNED", 0) != 0,
            cuda_version: number("FAKE_CUDA_VERSION", 12_080),
            nccl_version: number("FAKE_NCCL_VERSION", 22_707),
            dma_buf: number("FAKE_GPU_DMA_BUF", 0),
            nccl_channels: Some(number("FAKE_NCCL_CHANNELS", 0)).filter(|&channels| channels > 0),
            failures: failures.split(',').filter(|text| !text.is_empty()).map(failure).collect(),
        }
    })
}

/// Reads `call`, `call=code`, `call@first` or `call=code@first`.
fn failure(text: &str) -> Failure {
    let (rest, first) = text.split_once('@').unwrap_or((text, "1"));
    // CUDA_ERROR_UNKNOWN, ncclSystemError.
    let unknown = if rest.starts_with("cu") { "999" } else { "2" };
    let (call, code) = rest.split_once('=').unwrap_or((rest, unknown));
    let number =
        |text: &str| text.parse().unwrap_or_else(|_| panic!("FAKE_GPU_FAIL: {text} is no number"));
    let (code, first) = (number(code), number(first));
    Failure { call: call.to_owned(), code, first, calls: AtomicU32::new(0) }
}

/// The code with which this call shall fail now, if it shall. The names may lack `_v2`.
pub fn injected(call: &str) -> Option<u32> {
    let plain = call.strip_suffix("_v2").unwrap_or(call);
    let failure = settings().failures.iter().find(|f| f.call == call || f.call == plain)?;
    let calls = failure.calls.fetch_add(1, Ordering::Relaxed) + 1;
    (calls >= failure.first).then_some(failure.code)
}

/// Random numbers from a seed (splitmix64).
pub struct Random(u64);

impl Random {
    /// Numbers that differ for each stream of work.
    pub fn new(stream: u64) -> Random {
        Random(settings().seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ stream.wrapping_mul(0xd1b5))
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Sleeps a while, one time in three.
    pub fn dawdle(&mut self) {
        let longest = settings().delay_us;
        let drawn = self.next();
        if longest > 0 && drawn.is_multiple_of(3) {
            let delay = (drawn >> 8) % (longest + 1);
            std::thread::sleep(std::time::Duration::from_micros(delay));
        }
    }
}

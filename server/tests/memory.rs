//! What a core of a server takes for lanes and keys: every byte that it allocates is counted. In a
//! file, and so a process, of its own, which runs one test.

use bps_engine::base::{DType, Epoch, Key, Operation, Rank};
use bps_engine::lane::Endpoint;
use bps_engine::limits::RANKS_MAX;
use bps_engine::mem::{Arena, Options};
use bps_engine::proto::members::Members;
use bps_engine::proto::messages::KeySpec;
use bps_engine::proto::store::{Deltas, Store};
use bps_engine::ring::Mpsc;
use bps_engine::transport::sim::{Sim, SimNetwork};
use bps_engine::transport::{Link, Transport, Waker};
use bps_server::entry::{Groups, Turnout, Turnouts};
use bps_server::shard::{Command, Report, Shard};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

/// The system's allocator, and how many bytes it has given out.
struct Counting;

static BYTES: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    /// # Safety
    /// As [`System`]'s.
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        BYTES.fetch_add(layout.size(), Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    /// # Safety
    /// As [`System`]'s.
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        BYTES.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Bytes of every key: the smallest tensor, since accumulators are not what is measured.
const KEY_BYTES: u32 = 4;
const EPOCH: Epoch = Epoch(1);

/// A core on the simulated network that has lanes and keys.
struct Core {
    shard: Shard,
    network: SimNetwork,
    commands: Mpsc<Command>,
    reports: Mpsc<(u32, Report)>,
}

impl Core {
    fn new(ranks: usize) -> Core {
        let (network, waker) = (SimNetwork::new(1), Waker::new().expect("an eventfd"));
        let (commands, reports) = (Mpsc::new(64), Mpsc::new(64));
        let options = Options { name: "test".into(), numa_node: None, shared: false };
        let shard = Shard::new(
            0,
            Endpoint::new(vec![Transport::Sim(Sim::new(network.clone()))], waker.clone()),
            Arena::reserve(1 << 30, &options).expect("address space"),
            commands.clone(),
            reports.clone(),
            waker,
            Arc::default(),
            Duration::from_secs(3600),
        );
        let mut core = Core { shard, network, commands, reports };
        let groups: Vec<u32> = (0..ranks).map(|rank| u32::try_from(rank).unwrap()).collect();
        core.order(Command::Begin { epoch: EPOCH, groups: Arc::new(Groups::new(&groups)) });
        let begun = core.reports.pop().map(|(_, report)| report);
        assert!(matches!(begun, Some(Report::Begun { epoch: EPOCH })), "{begun:?}");
        core
    }

    fn order(&mut self, command: Command) {
        assert!(self.commands.push(command).is_ok(), "a short queue");
        self.shard.step(Duration::ZERO);
    }

    /// Takes a lane of each of these ranks, and gives their other ends.
    fn attach(&mut self, ranks: u32) -> Vec<Link> {
        let dial = |rank| {
            let (here, there) = self.network.link();
            self.order(Command::Attach { link: Link::Sim(here), rank: Rank(rank), epoch: EPOCH });
            assert!(self.reports.pop().is_none(), "a lane was turned away");
            Link::Sim(there)
        };
        (0..ranks).map(dial).collect()
    }

    fn install(&mut self, keys: u32, store: Option<Store>) {
        let (dtype, bytes, operation) = (DType::F32, KEY_BYTES, Operation::Sum);
        let spec = |key: u32| KeySpec {
            key: Key(key.into()),
            core: 0,
            dtype,
            bytes,
            operation,
            rounds: 0,
            members: Members::ALL,
            receiver: None,
            encoding: None,
            store,
        };
        self.order(Command::Install { request: 1, keys: (0..keys).map(spec).collect() });
        let (_, report) = self.reports.pop().expect("an answer");
        assert!(matches!(report, Report::Installed { request: 1 }), "{report:?}");
    }
}

/// Bytes that `work` has allocated and not given back.
fn taken<T>(work: impl FnOnce() -> T) -> (usize, T) {
    let before = BYTES.load(Relaxed);
    let kept = work();
    (BYTES.load(Relaxed).saturating_sub(before), kept)
}

/// Bytes of a core with so many lanes and keys, beyond one of as large a job that has neither.
fn bytes_of(job: usize, lanes: u32, keys: u32) -> (usize, (Core, Vec<Link>)) {
    bytes_where(job, lanes, keys, None)
}

/// The same where the keys are stored so.
fn bytes_where(
    job: usize,
    lanes: u32,
    keys: u32,
    store: Option<Store>,
) -> (usize, (Core, Vec<Link>)) {
    let mut core = Core::new(job);
    let (bytes, ends) = taken(|| {
        let ends = core.attach(lanes);
        core.install(keys, store);
        ends
    });
    (bytes, (core, ends))
}

/// What `docs/architecture.md` says of a core with these lanes and keys, and this is what it takes.
#[test]
fn memory_grows_with_lanes_and_with_keys_and_not_with_their_product() {
    const KEYS: u32 = 10_000;
    let lanes = u32::try_from(RANKS_MAX).expect("a few thousand");
    let (for_lanes, core) = bytes_of(RANKS_MAX, lanes, 0);
    drop(core);
    let (for_keys, core) = bytes_of(RANKS_MAX, 0, KEYS);
    drop(core);
    let (for_both, core) = bytes_of(RANKS_MAX, lanes, KEYS);
    drop(core);
    // Tables double as they grow, so one that is filled in another order may be twice as large.
    let apart = for_lanes + for_keys;
    assert!(for_both <= apart + apart / 20, "{for_both} bytes, and {apart} apart");
    // Nothing but the limit itself ends at it.
    let (for_more, core) = bytes_of(4 * RANKS_MAX, 4 * lanes, 0);
    drop(core);
    assert!(
        for_more <= 4 * for_lanes + for_lanes / 5,
        "{for_more} bytes, {for_lanes} for a fourth"
    );
    let groups: Vec<u32> = (0..lanes).collect();
    let mut turnouts = Turnouts::new(&Arc::new(Groups::new(&groups)));
    let (for_rounds, _) = taken(|| (0..KEYS).map(|_| turnouts.take()).collect::<Vec<Turnout>>());
    // Three bits for each rank and key, and little beside.
    let bits = 3 * lanes as usize * KEYS as usize / 8;
    assert!((bits..bits + bits / 20).contains(&for_rounds), "{for_rounds} bytes for {bits}");
    let deltas = Deltas { root: Rank(0), staleness: None };
    let (for_stored, core) = bytes_where(RANKS_MAX, 0, KEYS, Some(Store::Deltas(deltas)));
    drop(core);
    // A word and two bits for each rank and key, and little beside.
    let (more, counts) = (for_stored - for_keys, 8 * lanes as usize * KEYS as usize);
    assert!((counts..counts + counts / 20).contains(&more), "{more} bytes for {counts}");
    let megabytes = |bytes: usize| format!("{:.1} MB", bytes as f64 / 1e6);
    let line = format!(
        "{} for 4,096 lanes, {} for 10,000 keys ({:.0} MB more if they are stored), and {} while a \
         round of every key is open",
        megabytes(for_lanes),
        megabytes(for_keys),
        more as f64 / 1e6,
        megabytes(for_rounds)
    );
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/architecture.md");
    let text = std::fs::read_to_string(page).expect("a page of the documentation");
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words(&text).contains(&line), "docs/architecture.md should say: {line}");
}

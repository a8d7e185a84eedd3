//! Memory of GPUs: what a device that takes dma-buf does with it, and what becomes of one that does
//! not, or does it wrongly.

use super::*;
use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicI32;

const BYTES: usize = 20_000;

/// As memory of a GPU is exported: from a page on.
#[repr(align(4096))]
struct Memory([u8; BYTES]);

/// "Memory of a GPU" with a pattern at its front, and a blank one to land in.
struct Gpu {
    buffer: OwnedFd,
    from: Box<Memory>,
    to: Box<Memory>,
}

impl Gpu {
    fn new() -> Gpu {
        let buffer = std::fs::File::open("/dev/null").unwrap().into();
        let pattern = std::array::from_fn(|at| (at % 241).to_le_bytes()[0]);
        Gpu { buffer, from: Box::new(Memory(pattern)), to: Box::new(Memory([0; BYTES])) }
    }

    /// To send from, and to land in.
    fn register(&self, rails: &Arc<Rails>) -> Result<[GpuMemory; 2], RdmaError> {
        let over = |memory: &Memory, is_for_landing| {
            let at = (memory.0.as_ptr().cast_mut(), BYTES);
            let (ports, buffer) = (Ports::all(rails), self.buffer.as_fd());
            // SAFETY: the device is made up, and the memory outlives what is posted.
            unsafe { GpuMemory::register(&ports, buffer, at, is_for_landing, ()) }
        };
        Ok([over(&self.from, false)?, over(&self.to, true)?])
    }
}

/// Notes how many registrations live when this ends.
struct Kept(&'static Fake, Arc<AtomicI32>);

impl Drop for Kept {
    fn drop(&mut self) {
        self.1.store(self.0.regions.load(SeqCst), SeqCst);
    }
}

#[test]
fn memory_of_a_gpu_is_sent_from_in_place_or_refused_with_a_reason() {
    let (here, there) = (Fake::new("gpu"), Fake::new("gpu's peer"));
    let [mut left, mut right] = pair(&here.rails(false), &there.rails(false));
    let gpu = Gpu::new();
    let lanes = here.regions.load(SeqCst);
    here.dma_buf.store(libc::EOPNOTSUPP, SeqCst);
    let refused = gpu.register(&left.rails).err().unwrap();
    assert!(matches!(refused, RdmaError::DmaBuf { .. }), "{refused}");
    assert!(refused.to_string().contains("must take dma-buf"), "{refused}");
    here.dma_buf.store(0, SeqCst);
    let [from, to] = gpu.register(&left.rails).unwrap();
    drop(to);
    // SAFETY: the memory outlives the driver.
    unsafe { left.take_gpu(from) };
    // However short: a processor could not copy it.
    for length in [64, BYTES] {
        let sent = &gpu.from.0[..length];
        assert_eq!(transfer(&mut left, &mut right, sent), sent);
    }
    assert_eq!(left.rails.counters().staged_bytes.load(SeqCst), 0);
    assert_eq!(here.regions.load(SeqCst), lanes + 1, "what was let go is no more registered");
}

#[test]
fn a_trial_finds_out_whether_and_how_fast_a_device_reaches_a_gpu() {
    let here = Fake::new("trial");
    let rails = here.rails(false);
    let mut gpu = Gpu::new();
    let [from, to] = gpu.register(&rails).unwrap();
    let regions = here.regions.load(SeqCst);
    let speeds = try_gpu(&Ports::all(&rails), 0, (&from, &to), &gpu.from.0).unwrap();
    assert!(speeds.host > 0.0 && speeds.reads > 0.0 && speeds.writes > 0.0, "{speeds:?}");
    assert!(speeds.port.starts_with("trial port 1"), "{speeds:?}");
    assert!(gpu.to.0 == gpu.from.0, "the caller can see what the device has written");
    assert_eq!(here.regions.load(SeqCst), regions, "what the trial took is given back");
    // Of what is longer than an operation only the front is tried.
    here.message_bytes.store(5000, SeqCst);
    let short = here.rails(false);
    let [from, to] = gpu.register(&short).unwrap();
    gpu.to.0.fill(0);
    try_gpu(&Ports::all(&short), 0, (&from, &to), &gpu.from.0).unwrap();
    assert!(
        gpu.to.0[..5000] == gpu.from.0[..5000] && gpu.to.0[5000..].iter().all(|byte| *byte == 0)
    );
}

#[test]
fn a_trial_that_fails_says_why() {
    let here = Fake::new("failed trial");
    let rails = here.rails(false);
    let mut gpu = Gpu::new();
    let [from, to] = gpu.register(&rails).unwrap();
    let pattern = gpu.from.0;
    gpu.from.0[BYTES - 1] ^= 1;
    let wrong = try_gpu(&Ports::all(&rails), 0, (&from, &to), &pattern).unwrap_err();
    assert!(matches!(wrong, RdmaError::Direct { .. }), "{wrong}");
    assert!(wrong.to_string().contains("other bytes come from the GPU to the host"), "{wrong}");
    here.sending.store(12, SeqCst);
    let dead = try_gpu(&Ports::all(&rails), 0, (&from, &to), &pattern).unwrap_err();
    let dead = dead.to_string();
    assert!(
        dead.contains("from the host to the host, failed: RDMA status 12: no answer"),
        "{dead}"
    );
    here.sending.store(0, SeqCst);
    here.registering.store(libc::ENOMEM, SeqCst);
    let full = try_gpu(&Ports::all(&rails), 0, (&from, &to), &pattern).unwrap_err();
    assert!(matches!(full, RdmaError::Locked { need: BYTES, .. }), "{full}");
    drop((from, to));
    assert_eq!(here.regions.load(SeqCst), 0);
}

#[test]
fn answers_land_in_memory_of_a_gpu_or_give_it_back() {
    for (name, message_bytes) in [("gpu lands", 1 << 30), ("gpu declines", 10_000)] {
        let (here, there) = (Fake::new(name), Fake::new(&format!("server of {name}")));
        there.message_bytes.store(message_bytes, SeqCst);
        let [mut worker, mut server] = pair(&here.rails(false), &there.rails(false));
        let gpu = Gpu::new();
        let [from, to] = gpu.register(&worker.rails).unwrap();
        let at = |memory: &[u8]| {
            // SAFETY: only devices use it until the test looks, when they are done.
            unsafe { Writable::new(memory.as_ptr().cast_mut(), BYTES) }
        };
        // SAFETY: the memory outlives the drivers.
        unsafe {
            server.register(NonNull::from(&gpu.from.0[0]), BYTES).unwrap();
            worker.take_gpu(from);
            worker.take_gpu(to);
        }
        let into = at(&gpu.to.0);
        assert!(worker.grants(LANE, into));
        assert!(!worker.grants(LANE, at(&gpu.from.0)), "to send from only");
        let answer = Answer::Wanted { into, token: 9 };
        // SAFETY: nothing changes it.
        let payload = unsafe { Readable::of(&gpu.from.0) };
        let frame = Frame { answer, ..Frame::new([5; 64], payload, 0) };
        worker.post(LANE, &frame).unwrap();
        let (mut events, mut landed, mut ends) = (Vec::new(), vec![0; BYTES], Vec::new());
        // SAFETY: it is looked at once what lands has landed.
        let landing = Landing::Into(unsafe { Writable::of(&mut landed) });
        for _ in 0..40 {
            events.clear();
            worker.poll(&mut events);
            for event in &events {
                match event {
                    Event::Answered { token: 9, .. } => ends.push("straight"),
                    Event::Header { carried: Carried::Declined(9), .. } => {
                        assert!(gpu.to.0.iter().all(|byte| *byte == 0), "it was left alone");
                        worker.land(LANE, landing);
                    }
                    Event::Landed { .. } => ends.push("landed"),
                    Event::Sent { .. } => {}
                    other => panic!("{other:?}"),
                }
            }
            events.clear();
            server.poll(&mut events);
            for event in &events {
                if let Event::Header { carried, .. } = event {
                    server.land(LANE, landing);
                    let answer = Answer::To(carried.grant().unwrap());
                    let frame = Frame::new([6; 64], payload, 0);
                    server.post(LANE, &Frame { answer, ..frame }).unwrap();
                }
            }
        }
        let is_straight = message_bytes > 10_000;
        assert_eq!(ends, [if is_straight { "straight" } else { "landed" }], "{name}");
        assert!(landed == gpu.from.0, "{name}");
        assert!(gpu.to.0 == if is_straight { gpu.from.0 } else { [0; BYTES] }, "{name}");
    }
}

#[test]
fn memory_of_a_gpu_outlives_its_registration() {
    let (here, there) = (Fake::new("kept"), Fake::new("kept one's peer"));
    let [mut left, right] = pair(&here.rails(false), &there.rails(false));
    let gpu = Gpu::new();
    let at = (gpu.from.0.as_ptr().cast_mut(), BYTES);
    let lanes = here.regions.load(SeqCst);
    let ended = Arc::new(AtomicI32::new(-1));
    let register = |rails: &Arc<Rails>| {
        let kept = Kept(here, Arc::clone(&ended));
        let (ports, buffer) = (Ports::all(rails), gpu.buffer.as_fd());
        // SAFETY: nothing is posted from there.
        unsafe { GpuMemory::register(&ports, buffer, at, false, kept) }.unwrap()
    };
    drop(register(&left.rails));
    assert_eq!(ended.swap(-1, SeqCst), lanes, "by itself");
    let memory = register(&left.rails);
    // SAFETY: nothing is posted from there.
    unsafe { left.take_gpu(memory) };
    assert_eq!(ended.load(SeqCst), -1);
    drop((left, right));
    assert_eq!(ended.load(SeqCst), 0, "with the driver");
}

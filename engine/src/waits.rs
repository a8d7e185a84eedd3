//! How one thread of a process waits for another: for room in its queue, or for its end. Each wait
//! is bounded, and then names the thread. [`harness`](crate::harness), which starts polling
//! threads, passes these on; modules below it use them here.

#![forbid(unsafe_code)]

use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a thread of this process may leave its queue full, or take to start or to end, before
/// others go on without it. Its loop never waits that long: only a device or the kernel can hold
/// it.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// Offers between which a thread only yields; it sleeps between later ones.
const OFFERS_EAGER: u32 = 1000;
/// Between two offers to a queue that stays full, and two looks at a thread that ends.
const PAUSE: Duration = Duration::from_micros(200);

/// A thread that was told to end is still there.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "thread {name} was told to end and runs on after {} s: a device or the kernel holds it; read \
     the kernel's log, and end this process",
    waited.as_secs()
)]
pub struct StillRunning {
    /// The thread's name.
    pub name: String,
    /// For how long its end was waited for.
    pub waited: Duration,
}

/// Waits until a thread has ended that was told to, at most [`PATIENCE`]. One that ended by a panic
/// has said so; one of [`harness::spawn`](crate::harness::spawn) ends the process then.
///
/// # Errors
/// It still runs, and is left to itself.
pub fn join<T>(thread: JoinHandle<T>) -> Result<(), StillRunning> {
    join_within(thread, PATIENCE)
}

fn join_within<T>(thread: JoinHandle<T>, patience: Duration) -> Result<(), StillRunning> {
    let start = Instant::now();
    while !thread.is_finished() {
        if start.elapsed() >= patience {
            let name = thread.thread().name().unwrap_or("without a name").to_owned();
            return Err(StillRunning { name, waited: patience });
        }
        std::thread::sleep(PAUSE);
    }
    drop(thread.join());
    Ok(())
}

/// Offers a message to the queue of another thread until it is taken, at most for [`PATIENCE`], and
/// not once `is_over`. `push` returns what it does not take.
///
/// # Errors
/// The message.
pub fn offer<M>(
    message: M,
    is_over: impl Fn() -> bool,
    push: impl FnMut(M) -> Result<(), M>,
) -> Result<(), M> {
    offer_for(PATIENCE, message, is_over, push)
}

fn offer_for<M>(
    patience: Duration,
    mut message: M,
    is_over: impl Fn() -> bool,
    mut push: impl FnMut(M) -> Result<(), M>,
) -> Result<(), M> {
    let (mut start, mut offers) = (None, 0u32);
    while !is_over() {
        match push(message) {
            Ok(()) => return Ok(()),
            Err(back) => message = back,
        }
        if start.get_or_insert_with(Instant::now).elapsed() >= patience {
            break;
        }
        offers = offers.saturating_add(1);
        if offers <= OFFERS_EAGER { std::thread::yield_now() } else { std::thread::sleep(PAUSE) }
    }
    Err(message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spawn(name: &str, body: impl FnOnce() -> bool + Send + 'static) -> JoinHandle<bool> {
        std::thread::Builder::new().name(name.into()).spawn(body).expect("a thread")
    }

    #[test]
    fn a_queue_that_stays_full_and_a_thread_that_stays_are_given_up() {
        let short = Duration::from_millis(20);
        assert_eq!(offer_for(short, 7, || false, Err), Err(7));
        assert_eq!(offer_for(Duration::MAX, 7, || true, |_| Ok(())), Err(7));
        let mut offers = 0;
        let third = |message| {
            offers += 1;
            if offers == 3 { Ok(()) } else { Err(message) }
        };
        assert_eq!(offer_for(short, 7, || false, third), Ok(()));
        let (release, released) = std::sync::mpsc::channel::<()>();
        let body = move || released.recv_timeout(Duration::from_secs(10)).is_ok();
        let thread = spawn("bps-test-held", body);
        let error = join_within(thread, short).expect_err("it is held");
        assert_eq!(error, StillRunning { name: "bps-test-held".into(), waited: short });
        release.send(()).expect("it still waits");
        let thread = spawn("bps-test-ends", || true);
        assert_eq!(join(thread), Ok(()));
    }
}

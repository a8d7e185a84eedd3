//! How time passes in a cluster: in leaps, from one thing that happens to the next.

use super::{Cluster, Duration, gpu};

impl Cluster {
    /// The virtual time.
    #[must_use]
    pub fn now(&self) -> Duration {
        self.network.now()
    }

    /// Time stops here, also where nothing happens: whoever plays the seed does something then.
    pub fn wake_at(&mut self, at: Duration) {
        self.wakes_at = Some(at);
    }

    /// Nothing is left to do at this moment: on to the next letter, tick or delivery.
    pub(super) fn pass_time(&mut self) {
        let now = self.now();
        let letter = self.letters.keys().next().map(|&(at, _)| at);
        let device = gpu::with(|machine| machine.next()).flatten();
        let tick = self.next_tick.min(now + self.pause());
        let asked = self.wakes_at.filter(|at| *at > now);
        let next = letter.into_iter().chain(device).chain(asked).fold(tick, Duration::min);
        self.network.advance_within(next.saturating_sub(now).max(Duration::from_nanos(1)));
    }
}

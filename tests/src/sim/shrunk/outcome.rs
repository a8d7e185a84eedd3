//! What was seen of simulated jobs that go on without members.

/// What was seen.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Shrunk {
    /// Results that were compared.
    pub checked: u64,
    /// Of these, results that lack a rank.
    pub short: u64,
    /// Of these, results whose parts lack different ranks.
    pub mixed: u64,
    /// Broadcasts that failed because their root had died.
    pub lost: u64,
    /// Ranks that the job went on without.
    pub gone: u64,
    /// Rounds of parts without a rank, as the servers have counted them.
    pub counted: u64,
    /// Rounds of parts that were begun anew, as the servers have counted them.
    pub anew: u64,
    /// Contributions that came too late, as the servers have counted them.
    pub late: u64,
    /// Results that a rank got though it is not in them.
    pub given: u64,
    /// Servers that the job went on without.
    pub servers: u64,
    /// Of these, such as were told to leave, and could.
    pub let_go: u64,
    /// Parts that have moved from them.
    pub moved: u64,
    /// Of these, parts of jobs with hosts whose ranks sum among themselves.
    pub grouped: u64,
    /// Of these, parts with a result that only some ranks had.
    pub restored: u64,
    /// Results on GPUs, in jobs whose parts have moved.
    pub on_gpus: u64,
    /// Results on GPUs that lack a rank.
    pub short_on_gpus: u64,
    /// The job could not go on: a rank that alone had such a result died as well, or the others
    /// were leaving.
    pub ended: u64,
    /// A scheduler that followed a lost one could not go on.
    pub hindered: u64,
    /// Schedulers that were killed or stopped.
    pub schedulers: u64,
    /// Of these, such as went on when another one had started.
    pub thawed: u64,
    /// Times that parts have moved under a scheduler that had followed a lost one.
    pub followed: u64,
}

impl Shrunk {
    /// Adds what was seen of another seed.
    pub fn add(&mut self, other: &Shrunk) {
        let mut other = *other;
        let theirs = other.counts().map(|(_, count)| *count);
        self.counts().into_iter().zip(theirs).for_each(|((_, mine), theirs)| *mine += theirs);
    }

    /// Each with its name.
    pub fn counts(&mut self) -> [(&'static str, &mut u64); 21] {
        [
            ("results", &mut self.checked),
            ("short results", &mut self.short),
            ("results short in parts", &mut self.mixed),
            ("lost broadcasts", &mut self.lost),
            ("ranks", &mut self.gone),
            ("short rounds", &mut self.counted),
            ("rounds begun anew", &mut self.anew),
            ("servers", &mut self.servers),
            ("servers let go", &mut self.let_go),
            ("moved parts", &mut self.moved),
            ("moved parts of hosts", &mut self.grouped),
            ("restored parts", &mut self.restored),
            ("results on GPUs of jobs with moved parts", &mut self.on_gpus),
            ("short results on GPUs", &mut self.short_on_gpus),
            ("ended jobs", &mut self.ended),
            ("jobs that the next scheduler had to end", &mut self.hindered),
            ("schedulers", &mut self.schedulers),
            ("schedulers that went on", &mut self.thawed),
            ("moves under another scheduler", &mut self.followed),
            ("late contributions", &mut self.late),
            ("results of others", &mut self.given),
        ]
    }
}

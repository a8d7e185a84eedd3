//! Joining a job, what can be asked of it, and leaving it.

use super::own_gpu::OwnGpu;
use crate::base::error::{Error, Refusal};
use crate::base::lock;
use crate::base::task::Handle;
use crate::base::types::{Follow, Kept, PushPull, Speed, TensorId};
use crate::job::Job;
use crate::job::declared::Declared;
use crate::job::start;
use crate::rounds::Memory;
use bps_engine::base::{Operation, Rank};
use bps_engine::config::Config;
use bps_engine::keys::partition::tensor_bytes;
use bps_engine::optimize::Act;
use bps_engine::proto::encoding::Encoding;
use bps_engine::proto::messages::Declaration;
use bps_engine::proto::objects::ObjectKeys;
use bps_engine::proto::store::{Store, StoreFault};
use bps_engine::proto::unserved::Unserved;
use bps_engine::trace::log;
use bps_engine::wire::missing_by_rank;
use std::borrow::Cow;
use std::ops::RangeInclusive;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Tensors that are handed to the NIC loop before it is woken, in a long list.
const WAKE_EVERY: usize = 64;
/// Why a job of one process has no timeline.
/// How often it looks whether a result has come for which streams wait.
const LOOK: Duration = Duration::from_micros(200);
const ALONE: &str = "a job of one process sends nothing: there is no timeline";

pub(super) struct Shared {
    pub(super) rank: u32,
    size: u32,
    local_rank: u32,
    local_size: u32,
    pub(super) declared: Arc<Mutex<Declared>>,
    /// Keys of objects, in a job with a key.
    object_keys: Mutex<Option<ObjectKeys>>,
    pub(super) job: Option<Job>,
    pub(super) config: Config,
    pub(super) gpu: Mutex<OwnGpu>,
}

/// A rank of a job. Clones are the same one.
#[derive(Clone)]
pub struct Worker(pub(super) Arc<Shared>);

impl Worker {
    /// Joins the job that the configuration names: waits for all its nodes, at most
    /// [`Config::start_timeout`](bps_engine::config::Config), and connects to every server core. A
    /// job of one rank needs nobody else.
    ///
    /// # Errors
    /// [`Error::Config`] and [`Error::Start`], which say what to do.
    pub fn start(config: &Config) -> Result<Worker, Error> {
        Worker::start_again(config, None, None)
    }

    /// As [`start`](Self::start), in an elastic job of which this process was a rank before:
    /// `former` is the [`return_ticket`](Self::return_ticket) of that worker. The rank may be
    /// another one now, and the ranks may be others. `speaks` names the framework of this process,
    /// for messages.
    ///
    /// # Errors
    /// As there; [`Error::Start`] with its former name for a rank that the job has given up.
    pub fn start_again(
        config: &Config,
        former: Option<u64>,
        speaks: Option<&str>,
    ) -> Result<Worker, Error> {
        log::init(config.log_level, "worker");
        if !config.distributed() {
            if config.trace_on {
                log::warning!("{ALONE}");
            }
            return Ok(Worker(Arc::new(Shared::alone(config))));
        }
        let mut joined = start::join(config, former, speaks)?;
        let object_keys = Mutex::new(joined.object_keys.take());
        log::init(config.log_level, &format!("rank {}", joined.roster.index));
        let (rank, size) = (joined.roster.index, joined.roster.size);
        let alone = Shared::alone(config);
        let job = Job::start(config, joined, &alone.declared)?;
        if config.trace_on {
            let rounds = config.trace_start_step.into()..=config.trace_end_step.into();
            // Training does not depend on it.
            if let Err(error) = job.tracing.start(&config.trace_folder(), rounds) {
                log::warning!("{error}");
            }
        }
        let shared = Shared { rank, size, job: Some(job), object_keys, ..alone };
        Ok(Worker(Arc::new(shared)))
    }

    /// The key that authenticates the next object that `root` sends to all ranks under this name;
    /// none in a job without a key. Every rank has to ask once for each object.
    #[must_use]
    pub fn object_key(&self, name: &str, root: Rank) -> Option<[u8; 32]> {
        lock(&self.0.object_keys).as_mut().map(|keys| keys.next(name, root))
    }

    /// Whether optimizers are to train asynchronously (`BYTEPS_ENABLE_ASYNC`) where nobody says
    /// otherwise.
    #[must_use]
    pub fn enables_async(&self) -> bool {
        self.0.config.enable_async
    }

    /// For how many slow ranks rounds of an optimizer's gradients are not to wait
    /// (`BPS_BACKUP_WORKERS`) where nobody says otherwise.
    #[must_use]
    pub fn backup_workers(&self) -> u32 {
        self.0.config.backup_workers
    }

    /// This process's number, from 0.
    #[must_use]
    pub fn rank(&self) -> u32 {
        self.0.rank
    }

    /// Ranks in the job.
    #[must_use]
    pub fn size(&self) -> u32 {
        self.0.size
    }

    /// This process's number on its host, from 0.
    #[must_use]
    pub fn local_rank(&self) -> u32 {
        self.0.local_rank
    }

    /// Worker processes on this host.
    #[must_use]
    pub fn local_size(&self) -> u32 {
        self.0.local_size
    }

    /// Names tensors, in one round trip for all that are new. The same declaration again costs
    /// nothing. Another one of the same name makes it a new tensor, with an id of its own, which
    /// every rank must declare after as many pushes of the old one; the ids of both stay valid.
    ///
    /// # Errors
    /// [`Error::Mismatch`] where another rank says something else of the same name;
    /// [`Error::Refused`] for what the scheduler or a server can't serve, and for a tensor of a set
    /// of ranks of which this is none.
    pub fn declare(&self, tensors: &[Declaration]) -> Result<Vec<TensorId>, Error> {
        let tensors = &*self.0.settled(tensors)?;
        let news = lock(&self.0.declared).news(tensors);
        if !news.new.is_empty() || !news.replaced.is_empty() {
            let ids = self.0.job.as_ref().map(|job| job.declare(&news)).transpose()?;
            let mut declared = lock(&self.0.declared);
            let replaced = news.replaced.into_iter().map(|replacement| replacement.said);
            for (index, said) in news.new.into_iter().chain(replaced).enumerate() {
                let id =
                    ids.as_ref().map_or_else(|| declared.id_alone(&said.name), |ids| ids[index]);
                declared.insert(said, id);
            }
        }
        let declared = lock(&self.0.declared);
        tensors.iter().map(|said| declared.id(said)).collect()
    }

    /// Starts pushing tensors and pulling their results. One tensor may be under way several times:
    /// its rounds follow one another.
    ///
    /// # Safety
    /// Each `source` is valid for reading and each `target` for writing the declared bytes, and
    /// nobody changes or reads them (but for this engine) until the handle [polls](Handle::poll)
    /// true or the process ends. `source` may equal `target`; else they do not overlap.
    ///
    /// # Errors
    /// [`Error::Refused`] for a tensor that was not declared, or as one of the GPU; then none is
    /// started. What ends a push_pull under way is for its handle to say.
    pub unsafe fn push_pull(&self, items: &[PushPull]) -> Result<Vec<Handle>, Error> {
        // SAFETY: the caller's promise.
        unsafe { self.update(items, Act::NONE) }
    }

    /// As [`push_pull`](Self::push_pull), for tensors with optimizers: to let these step, or to set
    /// or get what servers keep for them. All ranks push a round for the same; the first round of a
    /// tensor in an epoch sets its parameters.
    ///
    /// # Safety
    /// As [`push_pull`](Self::push_pull).
    ///
    /// # Errors
    /// As [`push_pull`](Self::push_pull), and for what the optimizer of one of these does not do.
    /// Ranks that push one round for different things are told by [`Error::Disagree`], or that
    /// another rank has failed.
    pub unsafe fn update(&self, items: &[PushPull], act: Act) -> Result<Vec<Handle>, Error> {
        // All are looked up before the first is started: an error leaves nothing under way.
        let declared = lock(&self.0.declared);
        let known = |item: &PushPull| {
            let what = declared.what_for(item.tensor, act)?;
            Ok((*item, (what.bytes, what.operation)))
        };
        let items: Vec<_> = items.iter().map(known).collect::<Result<_, Error>>()?;
        drop(declared);
        self.0.count(items.iter().map(|(item, _)| item.tensor));
        let mut handles = Vec::with_capacity(items.len());
        for (item, (bytes, operation)) in &items {
            let is_root = *operation == Operation::Broadcast(Rank(self.0.rank));
            let copies = self.0.job.is_none() || is_root;
            if copies && *bytes > 0 && !std::ptr::eq(item.source, item.target) {
                // SAFETY: both are valid for the declared bytes and do not overlap, as the caller
                // promises.
                unsafe { std::ptr::copy_nonoverlapping(item.source, item.target, *bytes) };
            }
            handles.push(match &self.0.job {
                Some(job) => {
                    // SAFETY: the caller promises as much until the handle is over.
                    let memory = unsafe { Memory::new(item.source, item.target, *bytes) };
                    job.push(item.tensor, memory, item.priority, act)
                }
                None => Handle::finished(Ok(())),
            });
            // The loop begins with the first ones while the rest are handed over.
            if let Some(job) = &self.0.job
                && (handles.len() % WAKE_EVERY == 0 || handles.len() == items.len())
            {
                job.wake();
            }
        }
        Ok(handles)
    }

    /// Multiplies what error feedback adds to the next round of each of these tensors. For a
    /// learning rate that has changed, by the one before over the one to come: what was left out is
    /// then worth what it was (BytePS's vanilla error feedback). No round of them is to be under
    /// way, but for rounds of tensors on GPUs, behind all of which it comes.
    ///
    /// # Errors
    /// [`Error::Refused`] for a tensor that was not declared, or what ended the job.
    pub fn scale_residues(&self, tensors: &[TensorId], factor: f32) -> Result<(), Error> {
        let declared = lock(&self.0.declared);
        let (mut on_gpu, mut in_host) = (Vec::new(), Vec::new());
        for &tensor in tensors {
            let those = if declared.is_on_gpu(tensor)? { &mut on_gpu } else { &mut in_host };
            those.push(tensor.0);
        }
        drop(declared);
        let Some(job) = &self.0.job else { return Ok(()) };
        match job.gpu.inbox.get() {
            // What is kept in the host of tensors on GPUs is scaled by word of the pipeline, which
            // knows when.
            Some(gpu) if !on_gpu.is_empty() => gpu.scale_residues(&on_gpu, factor),
            _ => in_host.append(&mut on_gpu),
        }
        if in_host.is_empty() { Ok(()) } else { job.scale_residues(in_host, factor) }
    }

    /// What an encoded tensor has left out of its rounds so far, on this rank. No round of it is to
    /// be under way: where streams wait for results, [`settle`](Self::settle) first.
    ///
    /// # Errors
    /// As [`scale_residues`](Self::scale_residues).
    pub fn kept(&self, tensor: TensorId) -> Result<Kept, Error> {
        lock(&self.0.declared).size(tensor)?;
        self.0.job.as_ref().map_or_else(|| Ok(Kept::default()), |job| job.kept(tensor))
    }

    /// Lets an encoded tensor begin with what was left out of its rounds before, in another job
    /// perhaps. What is empty changes nothing.
    ///
    /// # Errors
    /// As [`scale_residues`](Self::scale_residues), and for another size than the tensor's.
    pub fn keep(&self, tensor: TensorId, kept: Kept) -> Result<(), Error> {
        let declared = lock(&self.0.declared);
        let (elements, name) = declared.size(tensor)?;
        for given in [kept.residue.len(), kept.velocity.len()] {
            if given > 0 && given as u64 != elements {
                return Err(Refusal::Kept { tensor: name.to_owned(), elements, given }.into());
            }
        }
        drop(declared);
        self.0.job.as_ref().map_or(Ok(()), |job| job.keep_for(tensor, kept))
    }

    /// Waits until every rank of the job has called it.
    ///
    /// # Errors
    /// [`Error::Timeout`], or what ended the job.
    pub fn barrier(&self, timeout: Option<Duration>) -> Result<(), Error> {
        self.0.job.as_ref().map_or(Ok(()), |job| job.barrier(timeout))
    }

    /// Says that this rank has no more data. From now on, until [`follow`](Self::follow) has told
    /// that all ranks have joined, it must push what that tells, and nothing on its own account.
    ///
    /// # Errors
    /// [`Error::Refused`] for a second call before that, or what ended the job.
    pub fn join(&self) -> Result<(), Error> {
        let Some(job) = &self.0.job else { return Ok(()) };
        let pushes = lock(&self.0.declared).join();
        job.join(pushes)
    }

    /// What a rank that has joined is told next; `None` if that takes longer than `timeout`. The
    /// ranks' rounds agree again once it has pushed all that it was told before
    /// [`Follow::AllJoined`].
    ///
    /// # Errors
    /// What ended the job.
    pub fn follow(&self, timeout: Duration) -> Result<Option<Follow>, Error> {
        let alone = || Ok(Some(Follow::AllJoined(Rank(self.0.rank))));
        self.0.job.as_ref().map_or_else(alone, |job| job.follow(timeout))
    }

    /// The ranks that are not in all of a result that is there, because they have died, and the job
    /// goes on without them, or were late; every rank is told the same. Where streams of a GPU wait
    /// for the result, it waits until that has come.
    ///
    /// # Errors
    /// [`Error::Timeout`] if the scheduler does not say who they are, or what ended the job.
    pub fn lacking(&self, handle: &Handle) -> Result<Vec<Rank>, Error> {
        let bits = self.bits_lacking(handle)?;
        if handle.lacks_by_rank() || missing_by_rank(self.0.size) {
            return Ok((0..u64::BITS).filter(|bit| bits >> bit & 1 == 1).map(Rank).collect());
        }
        match (&self.0.job, bits) {
            (Some(job), bits) if bits != 0 => job.gone(bits),
            _ => Ok(Vec::new()),
        }
    }

    fn bits_lacking(&self, handle: &Handle) -> Result<u64, Error> {
        loop {
            // In this order: the end comes behind all results that there are.
            let end = self.0.job.as_ref().and_then(Job::end_of_gpu);
            match (handle.lacking(), end) {
                (Some(bits), _) => return Ok(bits),
                (None, Some(error)) => return Err(error),
                // Bounded by what bounds every round: a stall ends the job.
                (None, None) => std::thread::sleep(LOOK),
            }
        }
    }

    /// Waits until all results have come for which streams of the GPU wait: a state that is kept
    /// from then on has nothing of a result that does not come.
    ///
    /// # Errors
    /// What ended the job, so that some may not have come.
    pub fn settle(&self) -> Result<(), Error> {
        self.0.job.as_ref().map_or(Ok(()), Job::settle)
    }

    /// How often this rank has pushed a tensor.
    #[must_use]
    pub fn pushes(&self, tensor: TensorId) -> u64 {
        lock(&self.0.declared).pushes(tensor)
    }

    /// Of a broadcast that is over, how often its root had pushed it when it joined: of the later
    /// rounds, nobody had anything to send. `None` if it has not joined.
    ///
    /// # Errors
    /// What ended the job.
    pub fn root_joined_after(&self, tensor: TensorId) -> Result<Option<u64>, Error> {
        match &self.0.job {
            Some(job) if lock(&self.0.declared).reports() => job.root_joined_after(tensor.0),
            _ => Ok(None),
        }
    }

    /// The oldest throughput sample not yet asked for; one is taken each second in which tensors
    /// finished.
    #[must_use]
    pub fn speed(&self) -> Option<Speed> {
        self.0.job.as_ref()?.speed()
    }

    /// Begins a timeline of these rounds of each tensor: of this rank, in `folder`, and of the
    /// servers. Rounds that are under way when it begins may be in it in part.
    ///
    /// # Errors
    /// [`Error::Refused`] if the file can't be written, or one is being written already. A job of
    /// one process sends nothing, so there it only says so on standard error.
    pub fn start_timeline(&self, folder: &Path, rounds: RangeInclusive<u64>) -> Result<(), Error> {
        let Some(job) = &self.0.job else {
            log::warning!("{ALONE}");
            return Ok(());
        };
        job.tracing.start(folder, rounds)
    }

    /// Ends this rank's timeline and returns when its file is written; without one it does nothing.
    /// The servers' end with that of the last rank.
    pub fn stop_timeline(&self) {
        if let Some(job) = &self.0.job {
            job.tracing.stop();
        }
    }

    /// The membership generation, from 1. In an elastic job it grows when members die or come.
    #[must_use]
    pub fn epoch(&self) -> u32 {
        self.0.job.as_ref().map_or(1, |job| job.gpu.epoch.0)
    }

    /// Whether rounds of this job go on without ranks that die: then no tensor has a receiver.
    #[must_use]
    pub fn shrinks(&self) -> bool {
        self.0.job.as_ref().is_some_and(|job| job.shrinks)
    }

    /// Nodes that wait to be let into an elastic job; `None` in any other. They are let in once all
    /// ranks have left with `suspend` and come back.
    #[must_use]
    pub fn newcomers(&self) -> Option<u32> {
        self.0.job.as_ref()?.newcomers()
    }

    /// Whether SIGTERM has told this rank of an elastic job to leave, by `shutdown` when the others
    /// expect that. Only after [`take_notice`](crate::terminated::take_notice): where nobody takes
    /// notice, SIGTERM ends the process.
    #[must_use]
    pub fn is_to_leave(&self) -> bool {
        self.0.job.as_ref().is_some_and(Job::is_to_leave)
    }

    /// What this rank shows when it comes back to its elastic job by
    /// [`start_again`](Self::start_again): a member's death has ended its epoch, or it is going to
    /// `suspend`. `None` where it cannot come back.
    #[must_use]
    pub fn return_ticket(&self, suspend: bool) -> Option<u64> {
        self.0.job.as_ref()?.return_ticket(suspend)
    }

    /// Leaves the job in good order. With `suspend` the servers and the scheduler stay, for workers
    /// to come.
    ///
    /// # Errors
    /// What ended the job before. The worker is gone all the same.
    pub fn shutdown(&self, suspend: bool) -> Result<(), Error> {
        self.0.job.as_ref().map_or(Ok(()), |job| job.leave(suspend))
    }
}

impl Shared {
    fn alone(config: &Config) -> Shared {
        Shared {
            rank: config
                .global_rank
                .unwrap_or(config.worker_id * config.local_size + config.local_rank),
            size: config.num_workers * config.local_size,
            local_rank: config.local_rank,
            local_size: config.local_size,
            declared: Arc::default(),
            object_keys: Mutex::default(),
            job: None,
            config: config.clone(),
            gpu: Mutex::default(),
        }
    }

    /// Declarations as the scheduler has to know them: without sets that are all ranks, without
    /// encodings of tensors that are not for them, and with this job's bound of staleness.
    fn settled<'a>(&self, tensors: &'a [Declaration]) -> Result<Cow<'a, [Declaration]>, Error> {
        for said in tensors {
            let checked = said.check_members(Rank(self.rank), self.size);
            checked.map_err(|cause| Refusal::Scheduler(Arc::new(cause)))?;
            // Whether the job shrinks, the scheduler knows, where there is one.
            let checked = said.check_receiver(self.size, false);
            checked.map_err(|cause| Refusal::Scheduler(Arc::new(cause)))?;
            if let Some(backup) = said.store.and_then(Store::backup).filter(|_| self.job.is_none())
                && let Err(fault) = backup.check_ranks(&said.members, self.size)
            {
                let (tensor, fault) = (said.name.clone(), fault.into());
                return Err(Refusal::Scheduler(Arc::new(Unserved::Store { tensor, fault })).into());
            }
            if said.store.is_some() && self.job.is_none() {
                let (tensor, fault) = (said.name.clone(), StoreFault::NoServer);
                return Err(Refusal::Scheduler(Arc::new(Unserved::Store { tensor, fault })).into());
            }
        }
        let least = u64::from(self.config.min_compress_bytes);
        let is_small = |said: &Declaration| {
            tensor_bytes(said.shape.count(), said.dtype).is_some_and(|bytes| bytes < least)
        };
        let is_left = |said: &Declaration| {
            let may_be = |encoding: Encoding| !encoding.auto || Encoding::may_choose(said.dtype);
            is_small(said) || !said.encoding.is_none_or(may_be)
        };
        let changes = |said: &Declaration| {
            let members = &said.members;
            members.clone().within(self.size) != *members
                || said.encoding.is_some() && is_left(said)
                || said.store.and_then(Store::backup).is_some_and(|backup| backup.behind == 0)
                || said.store.and_then(Store::deltas).is_some() && self.config.staleness.is_some()
        };
        if !tensors.iter().any(changes) {
            return Ok(Cow::Borrowed(tensors));
        }
        let mut tensors = tensors.to_vec();
        for said in &mut tensors {
            said.members = std::mem::take(&mut said.members).within(self.size);
            said.encoding = said.encoding.filter(|_| !is_left(said));
            match &mut said.store {
                Some(Store::Deltas(deltas)) => {
                    deltas.staleness = deltas.staleness.or(self.config.staleness);
                }
                Some(Store::Backup(backup)) if backup.behind == 0 => {
                    backup.behind = self.config.backup_behind;
                }
                _ => {}
            }
        }
        Ok(Cow::Owned(tensors))
    }

    /// Counts pushes that are about to start, and tells the scheduler if other ranks have replaced
    /// a tensor after fewer: then they have no such round, and all ranks have to know. While some
    /// rank has joined, it is told of all of them, and that rank pushes as often.
    pub(super) fn count(&self, tensors: impl Iterator<Item = TensorId>) {
        // A process alone has no scheduler, and no ranks that could replace a tensor.
        let Some(job) = &self.job else { return };
        let mut declared = lock(&self.declared);
        let (reports, mut pushed) = (declared.reports(), Vec::new());
        let mut count = |tensor: &TensorId| {
            if reports {
                pushed.push(*tensor);
            }
            declared.count(*tensor)
        };
        let beyond: Vec<TensorId> = tensors.filter(|tensor| count(tensor)).collect();
        let report = reports.then(|| declared.totals(&pushed));
        drop(declared);
        if let Some(pushes) = report {
            job.report(pushes);
        }
        for TensorId(tensor) in beyond {
            job.overrun(tensor);
        }
    }
}

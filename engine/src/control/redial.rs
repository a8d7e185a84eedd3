//! A node's way to the scheduler that follows a lost one: a connection is dialed by a thread, and
//! then asked, beside whatever is left of the old one, whether its scheduler leads the job.

use super::JobKey;
use super::link::{ControlLink, Door, LinkReceiver, LinkSender};
use crate::proto::messages::{NodeMessage, Register, SchedulerMessage};
use std::sync::mpsc::{Receiver, TryRecvError, sync_channel};
use std::time::{Duration, Instant};

/// How long one attempt to connect takes at most. It is more than a handshake needs, since a
/// process that has just started is slow.
const ATTEMPT: Duration = Duration::from_secs(2);

/// Where to dial, and as whom.
#[derive(Debug)]
pub struct Redial {
    root_uri: String,
    root_port: u16,
    key: JobKey,
    /// As what the node has registered; without, each connection has a session of its own.
    session: Option<u64>,
    interval: Duration,
    /// Silence after which a scheduler that was asked counts as none.
    patience: Duration,
    dialing: Option<Receiver<Option<ControlLink>>>,
    asked: Option<Asked>,
}

#[derive(Debug)]
struct Asked {
    sender: LinkSender,
    receiver: LinkReceiver,
    door: Door,
    beat: Instant,
    heard: Instant,
}

/// A connection to another scheduler.
pub struct Found {
    /// Its sending half.
    pub sender: LinkSender,
    /// Its receiving half.
    pub receiver: LinkReceiver,
    /// Where to knock if it falls silent.
    pub door: Door,
}

/// How far it is.
#[allow(clippy::large_enum_variant, reason = "it is taken apart at once")]
pub enum Progress {
    /// There is nothing new.
    None,
    /// Somebody listens: it is to be [asked](Redial::ask).
    Connected,
    /// It says this meanwhile.
    Says(SchedulerMessage),
    /// It leads the job.
    Leads {
        /// The connection.
        found: Box<Found>,
        /// Its term.
        term: u32,
    },
    /// This attempt is over.
    Failed,
}

impl Redial {
    /// Of a node that registered with this session.
    #[must_use]
    pub fn new(root: (&str, u16), key: &JobKey, session: u64, beats: (Duration, Duration)) -> Self {
        Redial { session: Some(session), ..Redial::to_register(root, key, beats) }
    }

    /// Of a node that is to [register](Self::register).
    #[must_use]
    pub fn to_register(root: (&str, u16), key: &JobKey, beats: (Duration, Duration)) -> Self {
        Redial {
            root_uri: root.0.to_owned(),
            root_port: root.1,
            key: key.clone(),
            session: None,
            interval: beats.0,
            patience: beats.1 + beats.0,
            dialing: None,
            asked: None,
        }
    }

    /// Begins an attempt.
    ///
    /// # Errors
    /// No thread is left.
    pub fn dial(&mut self) -> std::io::Result<()> {
        self.asked = None;
        let (send, links) = sync_channel(1);
        let (uri, port, key) = (self.root_uri.clone(), self.root_port, self.key.clone());
        let body = move || {
            let link = ControlLink::connect(&uri, port, &key, ATTEMPT).ok();
            // Nobody takes it where the node has ended, or its scheduler has answered after all.
            let _ = send.try_send(link);
        };
        std::thread::Builder::new().name("bps-redial".into()).spawn(body)?;
        self.dialing = Some(links);
        Ok(())
    }

    /// The old connection is of use again.
    pub fn forget(&mut self) {
        (self.dialing, self.asked) = (None, None);
    }

    /// Whether a scheduler was asked and has not answered: until then nothing that the old one says
    /// may be heeded, since the new one would not know of it.
    #[must_use]
    pub fn is_asking(&self) -> bool {
        self.asked.is_some()
    }

    /// Whether the attempt has come to something. If a scheduler was asked, this waits for up to
    /// `timeout` for what it says.
    pub fn poll(&mut self, timeout: Duration) -> Progress {
        if self.asked.is_some() {
            return self.listen(timeout);
        }
        let Some(dialing) = &self.dialing else { return Progress::None };
        match dialing.try_recv() {
            Err(TryRecvError::Empty) => return Progress::None,
            Ok(Some(link)) => {
                self.dialing = None;
                if let Ok(door) = link.door(&self.key) {
                    let door = Door { session: self.session.unwrap_or(door.session), ..door };
                    let (sender, receiver) = link.split();
                    let now = Instant::now();
                    self.asked = Some(Asked { sender, receiver, door, beat: now, heard: now });
                    return Progress::Connected;
                }
            }
            Ok(None) | Err(TryRecvError::Disconnected) => {}
        }
        self.dialing = None;
        Progress::Failed
    }

    /// Says who this node is and what it knows.
    pub fn ask(&mut self, messages: &[NodeMessage]) {
        let Some(asked) = &mut self.asked else { return };
        // One that can't be written to is closed, which `poll` finds.
        let _ = messages.iter().try_for_each(|message| asked.sender.send(message));
        asked.heard = Instant::now();
    }

    /// Registers with it, by a session of that connection.
    pub fn register(&mut self, register: &Register) {
        let Some(session) = self.asked.as_ref().map(|asked| asked.door.session) else { return };
        self.ask(&[NodeMessage::Register(Register { session, ..register.clone() })]);
    }

    /// The connection to a scheduler that was asked, which is this one's business no more.
    pub fn take(&mut self) -> Option<Found> {
        self.dialing = None;
        let Asked { sender, receiver, door, .. } = self.asked.take()?;
        Some(Found { sender, receiver, door })
    }

    fn listen(&mut self, timeout: Duration) -> Progress {
        let Some(asked) = &mut self.asked else { return Progress::None };
        if asked.beat.elapsed() >= self.interval {
            asked.beat = Instant::now();
            let _ = asked.sender.send(&NodeMessage::Heartbeat { rounds: 0 });
        }
        match asked.receiver.receive(timeout) {
            Ok(Some(SchedulerMessage::Resumed { term })) => {
                let Some(found) = self.take().map(Box::new) else { return Progress::None };
                return Progress::Leads { found, term };
            }
            Ok(Some(message)) => {
                asked.heard = Instant::now();
                return Progress::Says(message);
            }
            Ok(None) if asked.heard.elapsed() < self.patience => return Progress::None,
            Ok(None) | Err(_) => self.asked = None,
        }
        Progress::Failed
    }
}

//! What the launcher and its agents on other machines say to each other, as bytes on a pipe.
//!
//! A frame is its length (4 bytes, little-endian, without itself), a kind and fields. Before the
//! first frame an agent writes [`GREETING`]: what a login shell prints in front of it is skipped.
//! Both ends take any bytes: a frame that is none is a typed error, and never a panic.

#![forbid(unsafe_code)]

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};

/// Version of all below.
pub(super) const PROTOCOL: u32 = 2;
/// First bytes of an agent.
pub(super) const GREETING: &[u8] = b"\0bpslaunch agent\0";
/// Bytes of a frame, at most: environment and command are far smaller.
const FRAME_BYTES_MAX: usize = 8 << 20;
/// Bytes in front of the greeting, at most: a login message.
const NOISE_BYTES_MAX: usize = 256 << 10;
/// Entries of a list, at most.
const LIST_MAX: u32 = 65_536;

/// Why bytes of the other end make no sense.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub(super) enum FrameError {
    #[error("{0} bytes came, and no greeting of bpslaunch among them")]
    NoGreeting(usize),
    #[error("a frame of {0} bytes, more than {FRAME_BYTES_MAX}")]
    TooLong(usize),
    #[error("an empty frame")]
    Empty,
    #[error("a frame of the unknown kind {0}")]
    Kind(u8),
    #[error("a frame of kind {kind} that ends within its {field}")]
    Short { kind: u8, field: &'static str },
    #[error("a frame of kind {kind} whose {field} is {value}")]
    Value { kind: u8, field: &'static str, value: u64 },
    #[error("a frame of kind {kind} whose {field} is no text")]
    Text { kind: u8, field: &'static str },
    #[error("a frame of kind {kind} with {bytes} bytes too many")]
    Long { kind: u8, bytes: usize },
}

/// All that an agent is told about its machine's part of the job.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(super) struct Instruction {
    /// Variables of every process.
    pub(super) settings: Vec<(String, OsString)>,
    /// The job key in hexadecimal, where there is one.
    pub(super) key: Option<String>,
    /// Flags of the launcher, `--` and the user's command.
    pub(super) arguments: Vec<OsString>,
    /// The folder in which processes start.
    pub(super) folder: OsString,
    /// Python's virtual environment, whose programs come first.
    pub(super) virtual_environment: Option<OsString>,
    /// Whether the scheduler runs here.
    pub(super) scheduler: bool,
    /// Number and cores of each server here.
    pub(super) servers: Vec<(u32, u32)>,
    /// The number of this machine among those with ranks.
    pub(super) worker_id: u32,
    /// Ranks here.
    pub(super) workers: u32,
    /// Those of them to start now, by their places on the machine.
    pub(super) slots: Vec<u32>,
}

/// What the launcher tells an agent.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Order {
    /// Try whether this address can be reached.
    Probe(String),
    /// Start these processes. Those of the first such order have to start, all of them; one that
    /// comes later is for a rank that takes part from then on.
    Start(Box<Instruction>),
    /// Signal the group of a process.
    Signal { process: u32, signal: u32 },
    /// Tell a process that all ranks have ended.
    TellTheEnd { process: u32 },
}

/// What an agent says of itself, first.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(super) struct Hello {
    /// [`PROTOCOL`].
    pub(super) protocol: u32,
    /// The release of the program.
    pub(super) version: String,
    /// Ranks to run here if nobody says: one for each GPU, or one.
    pub(super) devices: u32,
    /// Ports that are kept free: of the scheduler, of torch's store, of the metrics.
    pub(super) ports: [u32; 3],
    /// `SSH_CONNECTION`: the addresses of both ends of the connection; empty without ssh.
    pub(super) connection: String,
    /// Names and addresses of the network interfaces.
    pub(super) interfaces: Vec<(String, String)>,
}

/// Why an agent that says this of itself can't take part.
pub(super) fn other_release(hello: &Hello) -> Option<String> {
    let own = env!("CARGO_PKG_VERSION");
    let is_other = hello.protocol != PROTOCOL || hello.version != own;
    is_other.then(|| {
        format!(
            "bpslaunch there is of release {}, and here of {own}; install the same on all machines",
            hello.version
        )
    })
}

/// What an agent tells the launcher. Processes are counted in the order of the instruction: the
/// scheduler, servers, ranks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Report {
    Hello(Hello),
    /// Whether the address of a probe was reached.
    Probed(bool),
    /// A line for the user.
    Note(String),
    /// Nothing was started, or it was ended: the code to leave with, and why.
    Refused {
        code: u32,
        why: String,
    },
    /// All processes have started.
    Started,
    /// What a process wrote to its standard output (0) or standard error (1); nothing at its end.
    Output {
        process: u32,
        target: u32,
        bytes: Vec<u8>,
    },
    /// A process has ended.
    Ended {
        process: u32,
        code: u32,
        how: String,
    },
    /// The agent is well; shows that the connection is, too.
    Alive,
}

/// Appends one frame to `out`.
pub(super) trait Encode {
    fn encode(&self, out: &mut Vec<u8>);
}

/// Made of one frame.
pub(super) trait Decode: Sized {
    fn decode(kind: u8, fields: &mut Fields<'_>) -> Result<Self, FrameError>;
}

impl Encode for Order {
    fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Order::Probe(address) => frame(out, 1, |out| put_bytes(out, address.as_bytes())),
            Order::Start(it) => frame(out, 2, |out| {
                put_list(out, &it.settings, |out, (name, value)| {
                    put_bytes(out, name.as_bytes());
                    put_bytes(out, value.as_bytes());
                });
                put_maybe(out, it.key.as_deref().map(str::as_bytes));
                put_list(out, &it.arguments, |out, word| put_bytes(out, word.as_bytes()));
                put_bytes(out, it.folder.as_bytes());
                put_maybe(out, it.virtual_environment.as_ref().map(|path| path.as_bytes()));
                put_number(out, it.scheduler.into());
                put_list(out, &it.servers, |out, (index, cores)| {
                    put_number(out, *index);
                    put_number(out, *cores);
                });
                put_number(out, it.worker_id);
                put_number(out, it.workers);
                put_list(out, &it.slots, |out, slot| put_number(out, *slot));
            }),
            Order::Signal { process, signal } => frame(out, 3, |out| {
                put_number(out, *process);
                put_number(out, *signal);
            }),
            Order::TellTheEnd { process } => frame(out, 4, |out| put_number(out, *process)),
        }
    }
}

impl Decode for Order {
    fn decode(kind: u8, fields: &mut Fields<'_>) -> Result<Order, FrameError> {
        Ok(match kind {
            1 => Order::Probe(fields.text("address")?),
            2 => Order::Start(Box::new(Instruction {
                settings: fields
                    .list("settings", |it| Ok((it.text("name")?, it.os_text("value")?)))?,
                key: fields.maybe("key", |it| it.text("key"))?,
                arguments: fields.list("arguments", |it| it.os_text("argument"))?,
                folder: fields.os_text("folder")?,
                virtual_environment: fields.maybe("environment", |it| it.os_text("environment"))?,
                scheduler: fields.up_to("scheduler", 1)? == 1,
                servers: fields
                    .list("servers", |it| Ok((it.number("server")?, it.number("cores")?)))?,
                worker_id: fields.number("worker")?,
                workers: fields.up_to("ranks", LIST_MAX)?,
                slots: fields.list("slots", |it| it.number("slot"))?,
            })),
            3 => Order::Signal {
                process: fields.number("process")?,
                signal: fields.up_to("signal", 31)?,
            },
            4 => Order::TellTheEnd { process: fields.number("process")? },
            kind => return Err(FrameError::Kind(kind)),
        })
    }
}

impl Encode for Report {
    fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Report::Hello(it) => frame(out, 1, |out| {
                put_number(out, it.protocol);
                put_bytes(out, it.version.as_bytes());
                put_number(out, it.devices);
                it.ports.iter().for_each(|port| put_number(out, *port));
                put_bytes(out, it.connection.as_bytes());
                put_list(out, &it.interfaces, |out, (name, address)| {
                    put_bytes(out, name.as_bytes());
                    put_bytes(out, address.as_bytes());
                });
            }),
            Report::Probed(reached) => frame(out, 2, |out| put_number(out, (*reached).into())),
            Report::Note(text) => frame(out, 3, |out| put_bytes(out, text.as_bytes())),
            Report::Refused { code, why } => frame(out, 4, |out| {
                put_number(out, *code);
                put_bytes(out, why.as_bytes());
            }),
            Report::Started => frame(out, 5, |_| {}),
            Report::Output { process, target, bytes } => frame(out, 6, |out| {
                put_number(out, *process);
                put_number(out, *target);
                put_bytes(out, bytes);
            }),
            Report::Ended { process, code, how } => frame(out, 7, |out| {
                put_number(out, *process);
                put_number(out, *code);
                put_bytes(out, how.as_bytes());
            }),
            Report::Alive => frame(out, 8, |_| {}),
        }
    }
}

impl Decode for Report {
    fn decode(kind: u8, fields: &mut Fields<'_>) -> Result<Report, FrameError> {
        Ok(match kind {
            1 => Report::Hello(Hello {
                protocol: fields.number("protocol")?,
                version: fields.text("version")?,
                devices: fields.up_to("devices", LIST_MAX)?,
                ports: [fields.port()?, fields.port()?, fields.port()?],
                connection: fields.text("connection")?,
                interfaces: fields
                    .list("interfaces", |it| Ok((it.text("name")?, it.text("address")?)))?,
            }),
            2 => Report::Probed(fields.up_to("answer", 1)? == 1),
            3 => Report::Note(fields.text("note")?),
            4 => Report::Refused { code: fields.up_to("code", 255)?, why: fields.text("reason")? },
            5 => Report::Started,
            6 => Report::Output {
                process: fields.number("process")?,
                target: fields.up_to("stream", 1)?,
                bytes: fields.bytes("output")?.to_vec(),
            },
            7 => Report::Ended {
                process: fields.number("process")?,
                code: fields.up_to("code", 255)?,
                how: fields.text("manner")?,
            },
            8 => Report::Alive,
            kind => return Err(FrameError::Kind(kind)),
        })
    }
}

fn frame(out: &mut Vec<u8>, kind: u8, fields: impl FnOnce(&mut Vec<u8>)) {
    let start = out.len();
    out.extend_from_slice(&[0; 4]);
    out.push(kind);
    fields(out);
    let length = bps_engine::base::word(out.len() - start - 4);
    out[start..start + 4].copy_from_slice(&length.to_le_bytes());
}

fn put_number(out: &mut Vec<u8>, number: u32) {
    out.extend_from_slice(&number.to_le_bytes());
}

fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    put_number(out, bps_engine::base::word(bytes.len()));
    out.extend_from_slice(bytes);
}

fn put_maybe(out: &mut Vec<u8>, bytes: Option<&[u8]>) {
    put_number(out, bytes.is_some().into());
    if let Some(bytes) = bytes {
        put_bytes(out, bytes);
    }
}

fn put_list<T>(out: &mut Vec<u8>, list: &[T], put: impl Fn(&mut Vec<u8>, &T)) {
    put_number(out, bps_engine::base::word(list.len()));
    list.iter().for_each(|item| put(out, item));
}

/// The fields of a frame, one after another.
pub(super) struct Fields<'a> {
    kind: u8,
    rest: &'a [u8],
}

impl<'a> Fields<'a> {
    fn number(&mut self, field: &'static str) -> Result<u32, FrameError> {
        let Some((number, rest)) = self.rest.split_first_chunk::<4>() else {
            return Err(FrameError::Short { kind: self.kind, field });
        };
        self.rest = rest;
        Ok(u32::from_le_bytes(*number))
    }

    fn up_to(&mut self, field: &'static str, max: u32) -> Result<u32, FrameError> {
        match self.number(field)? {
            number if number <= max => Ok(number),
            value => Err(FrameError::Value { kind: self.kind, field, value: value.into() }),
        }
    }

    fn port(&mut self) -> Result<u32, FrameError> {
        self.up_to("port", u16::MAX.into())
    }

    fn bytes(&mut self, field: &'static str) -> Result<&'a [u8], FrameError> {
        let length = self.number(field)? as usize;
        let Some((bytes, rest)) = self.rest.split_at_checked(length) else {
            return Err(FrameError::Short { kind: self.kind, field });
        };
        self.rest = rest;
        Ok(bytes)
    }

    fn text(&mut self, field: &'static str) -> Result<String, FrameError> {
        let bytes = self.bytes(field)?.to_vec();
        String::from_utf8(bytes).map_err(|_| FrameError::Text { kind: self.kind, field })
    }

    fn os_text(&mut self, field: &'static str) -> Result<OsString, FrameError> {
        Ok(OsString::from_vec(self.bytes(field)?.to_vec()))
    }

    fn maybe<T>(
        &mut self,
        field: &'static str,
        take: impl FnOnce(&mut Self) -> Result<T, FrameError>,
    ) -> Result<Option<T>, FrameError> {
        Ok(if self.up_to(field, 1)? == 1 { Some(take(self)?) } else { None })
    }

    fn list<T>(
        &mut self,
        field: &'static str,
        mut take: impl FnMut(&mut Self) -> Result<T, FrameError>,
    ) -> Result<Vec<T>, FrameError> {
        // No room is made for what was only announced.
        let count = self.up_to(field, LIST_MAX)?;
        (0..count).map(|_| take(self)).collect()
    }
}

/// Cuts a stream of bytes into frames.
pub(super) struct Decoder {
    bytes: Vec<u8>,
    /// Bytes at the front that have been decoded.
    done: usize,
    /// Whether the greeting is still to come.
    greets: bool,
}

impl Decoder {
    /// Of an agent's reports, behind its greeting.
    pub(super) fn of_agent() -> Decoder {
        Decoder { bytes: Vec::new(), done: 0, greets: true }
    }

    /// Of the launcher's orders.
    pub(super) fn of_launcher() -> Decoder {
        Decoder { bytes: Vec::new(), done: 0, greets: false }
    }

    /// Takes what came.
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.bytes.drain(..std::mem::take(&mut self.done));
        self.bytes.extend_from_slice(bytes);
    }

    /// What came in front of the greeting, while that has not come.
    pub(super) fn noise(&self) -> &[u8] {
        if self.greets { &self.bytes } else { &[] }
    }

    /// The next whole frame.
    pub(super) fn next<T: Decode>(&mut self) -> Result<Option<T>, FrameError> {
        if self.greets {
            let found = self.bytes.windows(GREETING.len()).position(|it| it == GREETING);
            let Some(position) = found else {
                let count = self.bytes.len();
                return if count > NOISE_BYTES_MAX {
                    Err(FrameError::NoGreeting(count))
                } else {
                    Ok(None)
                };
            };
            self.greets = false;
            self.done = position + GREETING.len();
        }
        let bytes = &self.bytes[self.done..];
        let Some((length, rest)) = bytes.split_first_chunk::<4>() else { return Ok(None) };
        let length = u32::from_le_bytes(*length) as usize;
        if length > FRAME_BYTES_MAX {
            return Err(FrameError::TooLong(length));
        }
        let Some(frame) = rest.get(..length) else { return Ok(None) };
        let (&kind, rest) = frame.split_first().ok_or(FrameError::Empty)?;
        let mut fields = Fields { kind, rest };
        let decoded = T::decode(kind, &mut fields)?;
        if !fields.rest.is_empty() {
            return Err(FrameError::Long { kind, bytes: fields.rest.len() });
        }
        self.done += 4 + length;
        Ok(Some(decoded))
    }
}

#[cfg(test)]
mod tests;

//! The pipes through which processes write to the launcher.

#![forbid(unsafe_code)]

use super::signals::set_nonblocking;
use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::Child;

/// Bytes read at once from one stream, so that a loud process does not keep the others waiting.
pub(super) const READ_BYTES: usize = 64 << 10;

/// One of the two streams that a process writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Target {
    Output,
    Error,
}

/// A stream of a process, by its place in the plan.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Source {
    pub(super) process: usize,
    pub(super) target: Target,
}

struct Stream {
    pipe: File,
    source: Source,
    open: bool,
}

/// Every stream that passes through the launcher; none if processes write past it.
pub(super) struct Streams {
    streams: Vec<Stream>,
    buffer: Vec<u8>,
}

impl Streams {
    pub(super) fn new() -> Streams {
        Streams { streams: Vec::new(), buffer: vec![0; READ_BYTES] }
    }

    /// Takes over the pipes of a process, if it has any.
    pub(super) fn add(&mut self, process: usize, child: &mut Child) -> io::Result<()> {
        let output = child.stdout.take().map(|pipe| (OwnedFd::from(pipe), Target::Output));
        let error = child.stderr.take().map(|pipe| (OwnedFd::from(pipe), Target::Error));
        for (pipe, target) in output.into_iter().chain(error) {
            set_nonblocking(&pipe)?;
            let source = Source { process, target };
            self.streams.push(Stream { pipe: File::from(pipe), source, open: true });
        }
        Ok(())
    }

    pub(super) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.streams.iter().filter(|stream| stream.open).map(|stream| stream.pipe.as_fd())
    }

    pub(super) fn are_open(&self) -> bool {
        self.streams.iter().any(|stream| stream.open)
    }

    /// Reads what there is, once from each stream, and hands it on; nothing at a stream's end.
    pub(super) fn pass_on(&mut self, sink: &mut dyn FnMut(Source, Option<&[u8]>)) {
        for stream in self.streams.iter_mut().filter(|stream| stream.open) {
            match stream.pipe.read(&mut self.buffer) {
                Ok(count @ 1..) => sink(stream.source, Some(&self.buffer[..count])),
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                Ok(_) | Err(_) => {
                    stream.open = false;
                    sink(stream.source, None);
                }
            }
        }
    }

    /// Gives up the streams that somebody still holds.
    pub(super) fn finish(&mut self, sink: &mut dyn FnMut(Source, Option<&[u8]>)) {
        for stream in self.streams.iter_mut().filter(|stream| stream.open) {
            stream.open = false;
            sink(stream.source, None);
        }
    }
}

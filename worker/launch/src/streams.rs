//! The output of all processes, on its way to the launcher's own.

#![forbid(unsafe_code)]

use super::output::Prefixer;
use super::signals::set_nonblocking;
use std::fs::File;
use std::io::{self, ErrorKind, IsTerminal, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::Child;
use std::time::Instant;

/// Bytes read at once from one stream, so that a loud process does not keep the others waiting.
const READ_BYTES: usize = 64 << 10;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Target {
    Output,
    Error,
}

struct Stream {
    source: File,
    target: Target,
    prefixer: Prefixer,
    open: bool,
}

/// Every stream that passes through the launcher; none if processes write past it.
pub(super) struct Streams {
    streams: Vec<Stream>,
    buffer: Vec<u8>,
    lines: Vec<u8>,
    processes: usize,
    colours: [bool; 2],
    gone: bool,
}

impl Streams {
    pub(super) fn new() -> Streams {
        let plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        let colours = [io::stdout().is_terminal() && !plain, io::stderr().is_terminal() && !plain];
        Streams {
            streams: Vec::new(),
            buffer: vec![0; READ_BYTES],
            lines: Vec::new(),
            processes: 0,
            colours,
            gone: false,
        }
    }

    /// Takes over the pipes of a process, if it has any.
    pub(super) fn add(&mut self, label: &str, child: &mut Child) -> io::Result<()> {
        let output = child.stdout.take().map(|pipe| (OwnedFd::from(pipe), Target::Output));
        let error = child.stderr.take().map(|pipe| (OwnedFd::from(pipe), Target::Error));
        for (pipe, target) in output.into_iter().chain(error) {
            set_nonblocking(&pipe)?;
            let colour = self.colours[target as usize].then_some(self.processes);
            let prefixer = Prefixer::new(label, colour);
            self.streams.push(Stream { source: File::from(pipe), target, prefixer, open: true });
        }
        self.processes += 1;
        Ok(())
    }

    pub(super) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.streams.iter().filter(|stream| stream.open).map(|stream| stream.source.as_fd())
    }

    pub(super) fn are_open(&self) -> bool {
        self.streams.iter().any(|stream| stream.open)
    }

    /// Whether the reader of the launcher's own output has gone away.
    pub(super) fn nobody_listens(&self) -> bool {
        self.gone
    }

    /// Reads what there is, once from each stream, and writes the lines that are ready.
    pub(super) fn pass_on(&mut self) {
        let now = Instant::now();
        for index in 0..self.streams.len() {
            let stream = &mut self.streams[index];
            if !stream.open {
                continue;
            }
            match stream.source.read(&mut self.buffer) {
                Ok(0) => stream.open = false,
                Ok(count) => {
                    stream.prefixer.push(&self.buffer[..count], now, &mut self.lines);
                }
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                Err(_) => stream.open = false,
            }
            if !stream.open {
                stream.prefixer.finish(&mut self.lines);
            }
            let target = stream.target;
            self.write(target);
        }
    }

    /// Writes what is left of lines that have not ended.
    pub(super) fn finish(&mut self) {
        for index in 0..self.streams.len() {
            let stream = &mut self.streams[index];
            stream.prefixer.finish(&mut self.lines);
            let target = stream.target;
            self.write(target);
        }
    }

    fn write(&mut self, target: Target) {
        if self.lines.is_empty() {
            return;
        }
        let written = match target {
            Target::Output => {
                let mut output = io::stdout().lock();
                output.write_all(&self.lines).and_then(|()| output.flush())
            }
            Target::Error => io::stderr().lock().write_all(&self.lines),
        };
        self.lines.clear();
        if written.is_err_and(|error| error.kind() == ErrorKind::BrokenPipe) {
            self.gone = true;
        }
    }
}

//! The launcher's own output, on which the lines of all processes meet.

#![forbid(unsafe_code)]

use super::output::Prefixer;
use super::streams::{Source, Target};
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::time::Instant;

/// Standard output and standard error of the launcher.
pub(super) struct Screen {
    /// Of each process: its standard output, and its standard error. Empty if bytes pass as they
    /// are.
    prefixers: Vec<[Prefixer; 2]>,
    prefix: bool,
    /// Whether standard output and standard error are coloured.
    colours: [bool; 2],
    lines: Vec<u8>,
    gone: bool,
}

impl Screen {
    /// Puts these labels, in the order of the plan, in front of lines; or passes everything as it
    /// is.
    pub(super) fn new<'a>(labels: impl Iterator<Item = &'a str>, prefix: bool) -> Screen {
        let plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        let colours = [io::stdout().is_terminal() && !plain, io::stderr().is_terminal() && !plain];
        let mut screen =
            Screen { prefixers: Vec::new(), prefix, colours, lines: Vec::new(), gone: false };
        for label in labels {
            screen.add(label);
        }
        screen
    }

    /// Puts a label in front of the lines of one more process; returns the number that it is shown
    /// by.
    pub(super) fn add(&mut self, label: &str) -> usize {
        let index = self.prefixers.len();
        if self.prefix {
            let prefixers =
                self.colours.map(|colours| Prefixer::new(label, colours.then_some(index)));
            self.prefixers.push(prefixers);
        }
        index
    }

    /// Whether the reader of the output has gone away.
    pub(super) fn nobody_listens(&self) -> bool {
        self.gone
    }

    /// Writes what a process wrote, in whole lines; what is left of one when the stream has ended.
    pub(super) fn show(&mut self, source: Source, bytes: Option<&[u8]>) {
        let prefixers = self.prefixers.get_mut(source.process);
        match (prefixers.map(|prefixers| &mut prefixers[source.target as usize]), bytes) {
            (Some(prefixer), Some(bytes)) => prefixer.push(bytes, Instant::now(), &mut self.lines),
            (Some(prefixer), None) => prefixer.finish(&mut self.lines),
            (None, Some(bytes)) => self.lines.extend_from_slice(bytes),
            (None, None) => {}
        }
        if self.lines.is_empty() {
            return;
        }
        let written = match source.target {
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

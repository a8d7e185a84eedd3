//! Puts the label of a process in front of each line that it writes, and writes the launcher's own.
//!
//! Lines come out whole. Progress bars rewrite their line with carriage returns, which several
//! processes on one screen cannot do: of each line's states at most one a second comes out, and the
//! last one always.

#![forbid(unsafe_code)]

use std::io::Write;
use std::time::{Duration, Instant};

/// Longest line that is kept back; a longer one comes out in pieces.
const LINE_BYTES_MAX: usize = 64 << 10;
/// Time between two states of a line that rewrites itself.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);

/// Colours of the labels, told apart by their number.
const COLOURS: &[u8] = &[36, 33, 35, 32, 34, 31];

/// One stream of one process.
pub(super) struct Prefixer {
    prefix: Vec<u8>,
    /// Of the line that has not ended.
    pending: Vec<u8>,
    /// Whether the last byte was a carriage return.
    returned: bool,
    /// The state of the line that a carriage return has ended, and that has not come out.
    progress: Option<Vec<u8>>,
    progress_at: Option<Instant>,
}

impl Prefixer {
    pub(super) fn new(label: &str, colour: Option<usize>) -> Prefixer {
        let prefix = match colour {
            Some(index) => {
                format!("\x1b[{}m[{label}]\x1b[0m ", COLOURS[index % COLOURS.len()])
            }
            None => format!("[{label}] "),
        };
        Prefixer {
            prefix: prefix.into_bytes(),
            pending: Vec::new(),
            returned: false,
            progress: None,
            progress_at: None,
        }
    }

    /// Takes what the process wrote, and appends the lines that are ready to `out`.
    pub(super) fn push(&mut self, bytes: &[u8], now: Instant, out: &mut Vec<u8>) {
        for piece in bytes.split_inclusive(|byte| matches!(byte, b'\n' | b'\r')) {
            // A carriage return in front of a line feed belongs to the end of the line.
            if self.returned && piece != b"\n" {
                self.end_state(now, out);
            }
            self.returned = false;
            match piece.split_last() {
                Some((b'\n', text)) => {
                    self.append(text, out);
                    self.end_line(out);
                }
                Some((b'\r', text)) => {
                    self.append(text, out);
                    self.returned = true;
                }
                _ => self.append(piece, out),
            }
        }
    }

    /// The process will write no more.
    pub(super) fn finish(&mut self, out: &mut Vec<u8>) {
        if !self.pending.is_empty() || self.progress.is_some() {
            self.end_line(out);
        }
    }

    fn append(&mut self, mut text: &[u8], out: &mut Vec<u8>) {
        while self.pending.len() + text.len() > LINE_BYTES_MAX {
            let (head, tail) = text.split_at(LINE_BYTES_MAX - self.pending.len());
            self.pending.extend_from_slice(head);
            self.end_line(out);
            text = tail;
        }
        self.pending.extend_from_slice(text);
    }

    fn end_line(&mut self, out: &mut Vec<u8>) {
        // What follows a carriage return has overwritten what came before it, unless nothing did.
        let progress = self.progress.take();
        out.extend_from_slice(&self.prefix);
        match progress {
            Some(state) if self.pending.is_empty() => out.extend_from_slice(&state),
            _ => out.append(&mut self.pending),
        }
        out.push(b'\n');
    }

    fn end_state(&mut self, now: Instant, out: &mut Vec<u8>) {
        if self.pending.is_empty() {
            return;
        }
        self.progress = Some(std::mem::take(&mut self.pending));
        if self.progress_at.is_none_or(|at| now.duration_since(at) >= PROGRESS_INTERVAL) {
            self.progress_at = Some(now);
            self.end_line(out);
        }
    }
}

/// One line from the launcher itself. That nobody may read it is no reason to stop.
pub(super) fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "bpslaunch: {text}");
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pushes the pieces one by one, `gap` apart.
    fn lines(pieces: &[&str], gap: Duration) -> String {
        let mut prefixer = Prefixer::new("rank 3", None);
        let mut out = Vec::new();
        let mut now = Instant::now();
        for piece in pieces {
            prefixer.push(piece.as_bytes(), now, &mut out);
            now += gap;
        }
        prefixer.finish(&mut out);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn lines_are_whole_however_they_come() {
        let text = "one\n\ntwo\r\nthree";
        let wanted = "[rank 3] one\n[rank 3] \n[rank 3] two\n[rank 3] three\n";
        assert_eq!(lines(&[text], Duration::ZERO), wanted);
        let bytes: Vec<&str> = text.split("").collect();
        assert_eq!(lines(&bytes, Duration::ZERO), wanted);
        assert_eq!(lines(&[], Duration::ZERO), "");
    }

    #[test]
    fn progress_comes_once_a_second_and_at_its_end() {
        // One carriage return after each state, and one before each, as tqdm does.
        let after = ["1%\r", "2%\r", "3%\r", "4%\r", "5%\r", "done\n"];
        let before = ["\r1%", "\r2%", "\r3%", "\r4%", "\r5%", "\rdone\n"];
        for states in [after, before] {
            let quick = lines(&states, Duration::from_millis(10));
            assert_eq!(quick, "[rank 3] 1%\n[rank 3] done\n");
        }
        let slow = lines(&after, Duration::from_millis(600));
        assert_eq!(slow, "[rank 3] 1%\n[rank 3] 3%\n[rank 3] 5%\n[rank 3] done\n");
        let cut = lines(&after[..5], Duration::from_millis(10));
        assert_eq!(cut, "[rank 3] 1%\n[rank 3] 5%\n");
    }

    #[test]
    fn a_line_without_end_is_bounded() {
        let text = "x".repeat(3 * LINE_BYTES_MAX + 5);
        let out = lines(&[&text], Duration::ZERO);
        assert_eq!(out.lines().count(), 4);
        assert_eq!(out.matches('x').count(), text.len());
    }

    #[test]
    fn colours_end() {
        let mut out = Vec::new();
        Prefixer::new("rank 0", Some(6)).push(b"a\n", Instant::now(), &mut out);
        assert_eq!(out, b"\x1b[36m[rank 0]\x1b[0m a\n");
    }
}

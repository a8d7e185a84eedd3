//! The log of control threads: one line on standard error per call, `bps <role> <index>: text`.
//!
//! Data threads never call it. A line is one `write`, so lines of several threads and processes do
//! not mix, and control characters in it (which may come from a peer) are escaped, so that one call
//! is one line.

use crate::config::LogLevel;
use std::fmt::{Arguments, Write as _};
use std::io::Write as _;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{PoisonError, RwLock};

static LEVEL: AtomicU8 = AtomicU8::new(LogLevel::Info as u8);
static PREFIX: RwLock<String> = RwLock::new(String::new());

/// Sets what is printed, and who says it: "server 0", "worker 1", "scheduler". The last call holds.
pub fn init(level: LogLevel, prefix: &str) {
    LEVEL.store(level as u8, Ordering::Relaxed);
    prefix.clone_into(&mut PREFIX.write().unwrap_or_else(PoisonError::into_inner));
}

/// Whether lines of this level are printed.
#[must_use]
pub fn enabled(level: LogLevel) -> bool {
    level as u8 <= LEVEL.load(Ordering::Relaxed)
}

/// Prints one line; the macros of this module call it when the level is enabled.
pub fn line(level: LogLevel, text: Arguments<'_>) {
    let line = format_line(&PREFIX.read().unwrap_or_else(PoisonError::into_inner), level, text);
    // Nobody is left to be told when standard error is gone.
    let _ = std::io::stderr().write_all(line.as_bytes());
}

fn format_line(prefix: &str, level: LogLevel, text: Arguments<'_>) -> String {
    let space = if prefix.is_empty() { "" } else { " " };
    let word = match level {
        LogLevel::Error => "error: ",
        LogLevel::Warning => "warning: ",
        LogLevel::Info | LogLevel::Debug => "",
    };
    let mut line = format!("bps{space}{prefix}: {word}");
    for character in text.to_string().trim_end().chars() {
        // Writing to a String cannot fail.
        let _ = match character {
            '\t' => line.write_char(character),
            control if control.is_control() => write!(line, "{}", control.escape_default()),
            plain => line.write_char(plain),
        };
    }
    line.push('\n');
    line
}

macro_rules! level_macro {
    ($dollar:tt $name:ident $exported:ident $level:ident $doc:literal) => {
        #[doc = $doc]
        #[macro_export]
        macro_rules! $exported {
                            ($dollar($text:tt)*) => {
                                if $crate::trace::log::enabled($crate::config::LogLevel::$level) {
                                    $crate::trace::log::line(
                                        $crate::config::LogLevel::$level,
                                        ::std::format_args!($dollar($text)*),
                                    );
                                }
                            };
                        }
        pub use $exported as $name;
    };
}

level_macro!($ error log_error Error "Prints what ends the process.");
level_macro!($ warning log_warning Warning "Prints what the user should act on.");
level_macro!($ info log_info Info "Prints starts, ends, and choices made.");
level_macro!($ debug log_debug Debug "Prints what else happens outside the data plane.");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_a_line() {
        let line = format_line(
            "server 0",
            LogLevel::Warning,
            format_args!("rank {} said \"a\nb\x1b[0m\"\n", 3),
        );
        assert_eq!(line, "bps server 0: warning: rank 3 said \"a\\nb\\u{1b}[0m\"\n");
        assert_eq!(format_line("", LogLevel::Info, format_args!("up")), "bps: up\n");
    }

    #[test]
    fn levels_are_ordered() {
        assert!(enabled(LogLevel::Error));
        assert!((LogLevel::Error as u8) < LogLevel::Debug as u8);
    }
}

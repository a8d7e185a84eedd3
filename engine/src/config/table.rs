//! What a row of the table is: a name, a flag, a field of [`Config`], and how text becomes its
//! value.
//!
//! The rows themselves are in the modules below. A row holds no default: [`Config::default`] does.

use super::Config;
use std::path::PathBuf;
use std::time::Duration;

mod backup;
mod bytescheduler;
mod choices;
mod elastic;
mod gpus;
mod launcher;
mod rows;
mod tuning;

/// Every knob, in the order in which the documents list them.
pub static TABLE: &[Row] = &JOINED;

const PARTS: [&[Row]; 7] = [
    rows::ROWS,
    tuning::ROWS,
    backup::ROWS,
    gpus::ROWS,
    launcher::ROWS,
    elastic::ROWS,
    bytescheduler::ROWS,
];

const COUNT: usize = {
    let (mut count, mut part) = (0, 0);
    while part < PARTS.len() {
        count += PARTS[part].len();
        part += 1;
    }
    count
};

static JOINED: [Row; COUNT] = {
    let mut all = [rows::ROWS[0]; COUNT];
    let (mut part, mut of_part, mut index) = (0, 0, 0);
    while index < all.len() {
        if of_part == PARTS[part].len() {
            (part, of_part) = (part + 1, 0);
        }
        all[index] = PARTS[part][of_part];
        (of_part, index) = (of_part + 1, index + 1);
    }
    all
};

/// A program that reads the configuration.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Program {
    /// A training process: it has no command line of ours.
    Worker,
    /// `bps-server`.
    Server,
    /// `bps-scheduler`.
    Scheduler,
    /// `bpslaunch`.
    Launcher,
    /// `bps-top`.
    Top,
}

impl Program {
    /// The name that `--help` and errors use.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Program::Worker => "worker",
            Program::Server => "bps-server",
            Program::Scheduler => "bps-scheduler",
            Program::Launcher => "bpslaunch",
            Program::Top => "bps-top",
        }
    }

    const fn bit(self) -> u8 {
        match self {
            Program::Worker => WORKER,
            Program::Server => SERVER,
            Program::Scheduler => SCHEDULER,
            Program::Launcher => LAUNCHER,
            Program::Top => TOP,
        }
    }
}

const WORKER: u8 = 1;
const SERVER: u8 = 2;
const SCHEDULER: u8 = 4;
const LAUNCHER: u8 = 8;
const TOP: u8 = 16;

/// The heading under which a row is listed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Group {
    Job,
    Network,
    Gpus,
    Tensors,
    Threads,
    Limits,
    Output,
    Metrics,
    Launcher,
    ByteScheduler,
}

impl Group {
    pub(super) const ALL: [Group; 10] = [
        Group::Job,
        Group::Network,
        Group::Gpus,
        Group::Tensors,
        Group::Threads,
        Group::Limits,
        Group::Output,
        Group::Metrics,
        Group::Launcher,
        Group::ByteScheduler,
    ];

    pub(super) const fn title(self) -> &'static str {
        match self {
            Group::Job => "Job",
            Group::Network => "Network",
            Group::Gpus => "GPUs",
            Group::Tensors => "Tensors",
            Group::Threads => "Threads",
            Group::Limits => "Time limits",
            Group::Output => "Output",
            Group::Metrics => "Metrics",
            Group::Launcher => "Launcher",
            Group::ByteScheduler => "ByteScheduler",
        }
    }
}

/// Where a value lives in [`Config`], and which texts are values. One accessor serves reading and
/// writing.
#[derive(Clone, Copy)]
pub(super) enum Field {
    Count {
        at: fn(&mut Config) -> &mut u32,
        min: u32,
        max: u32,
    },
    MaybeCount {
        at: fn(&mut Config) -> &mut Option<u32>,
        max: u32,
    },
    /// Numbers that differ, with commas between them; kept in rising order.
    Counts {
        at: fn(&mut Config) -> &mut Vec<u32>,
        max: u32,
    },
    Wide {
        at: fn(&mut Config) -> &mut u64,
    },
    Port {
        at: fn(&mut Config) -> &mut u16,
    },
    Bytes {
        at: fn(&mut Config) -> &mut u32,
        min: u32,
        max: u32,
    },
    Seconds {
        at: fn(&mut Config) -> &mut Duration,
        min: f64,
        max: f64,
    },
    Switch {
        at: fn(&mut Config) -> &mut bool,
    },
    Text {
        at: fn(&mut Config) -> &mut String,
    },
    MaybeText {
        at: fn(&mut Config) -> &mut Option<String>,
    },
    /// A flag that may be given several times; each adds one.
    Texts {
        at: fn(&mut Config) -> &mut Vec<String>,
    },
    Path {
        at: fn(&mut Config) -> &mut Option<PathBuf>,
    },
    /// `names` are the values that the documents show; `set` may know other spellings.
    Choice {
        names: &'static str,
        set: fn(&mut Config, &str) -> bool,
        get: fn(&Config) -> &str,
    },
}

/// One knob.
#[derive(Clone, Copy)]
pub struct Row {
    pub(super) variable: &'static str,
    pub(super) aliases: &'static [&'static str],
    pub(super) flag: Option<&'static str>,
    pub(super) flag_alias: Option<&'static str>,
    pub(super) short: Option<char>,
    /// Where the launcher keeps the flag's text if it is no number.
    pub(super) or_text: Option<fn(&mut Config) -> &mut Option<String>>,
    pub(super) programs: u8,
    pub(super) group: Group,
    pub(super) field: Field,
    pub(super) example: &'static str,
    pub(super) secret: bool,
    /// Whether a variable that is set and empty is a value, and not the same as unset.
    pub(super) keeps_empty: bool,
    pub(super) meaning: &'static str,
}

impl Row {
    const fn new(
        variable: &'static str,
        programs: u8,
        group: Group,
        field: Field,
        example: &'static str,
        meaning: &'static str,
    ) -> Row {
        Row {
            variable,
            aliases: &[],
            flag: None,
            flag_alias: None,
            short: None,
            or_text: None,
            programs,
            group,
            field,
            example,
            secret: false,
            keeps_empty: false,
            meaning,
        }
    }

    const fn flag(mut self, flag: &'static str) -> Row {
        self.flag = Some(flag);
        self
    }

    const fn flag_alias(mut self, flag: &'static str) -> Row {
        self.flag_alias = Some(flag);
        self
    }

    const fn short(mut self, letter: char) -> Row {
        self.short = Some(letter);
        self
    }

    const fn or_text(mut self, at: fn(&mut Config) -> &mut Option<String>) -> Row {
        self.or_text = Some(at);
        self
    }

    const fn aliases(mut self, aliases: &'static [&'static str]) -> Row {
        self.aliases = aliases;
        self
    }

    const fn secret(mut self) -> Row {
        self.secret = true;
        self
    }

    const fn keeps_empty(mut self) -> Row {
        self.keeps_empty = true;
        self
    }

    /// The variable, or the flag of a row that has no variable.
    #[must_use]
    pub fn name(&self) -> &'static str {
        if self.variable.is_empty() { self.flag.unwrap_or("") } else { self.variable }
    }

    /// The variable's names, the first one first. None for a row that is only a flag.
    pub(super) fn variables(&self) -> impl Iterator<Item = &'static str> {
        let own = (!self.variable.is_empty()).then_some(self.variable);
        own.into_iter().chain(self.aliases.iter().copied())
    }

    pub(super) fn used_by(&self, program: Program) -> bool {
        self.programs & program.bit() != 0
    }

    /// Whether the flag may stand without a value.
    pub(super) fn is_switch(&self) -> bool {
        matches!(self.field, Field::Switch { .. })
    }

    /// Whether each further value of the flag adds to those before it.
    pub(super) fn is_list(&self) -> bool {
        matches!(self.field, Field::Texts { .. })
    }

    /// What stands for the value in `--help`.
    pub(super) fn placeholder(&self) -> &'static str {
        match self.field {
            Field::Seconds { .. } => "SECONDS",
            Field::Bytes { .. } => "BYTES",
            Field::Count { .. } | Field::MaybeCount { .. } | Field::Wide { .. } => "N",
            Field::Counts { .. } => "N,N",
            Field::Port { .. } => "PORT",
            Field::Switch { .. } => "0|1",
            Field::Path { .. } => "PATH",
            Field::Text { .. } | Field::MaybeText { .. } | Field::Texts { .. } => "TEXT",
            Field::Choice { .. } => "WORD",
        }
    }

    /// The values that this row takes, in words.
    pub(super) fn allowed(&self) -> String {
        match &self.field {
            Field::Count { min, max, .. } => format!("a whole number from {min} to {max}"),
            Field::MaybeCount { max, .. } => format!("a whole number from 0 to {max}"),
            Field::Counts { max, .. } => {
                format!("whole numbers from 0 to {max}, each once, with commas between them")
            }
            Field::Wide { .. } => format!("a whole number from 0 to {}", u64::MAX),
            Field::Port { .. } => "a port from 0 to 65535".to_owned(),
            Field::Bytes { min, max, .. } => {
                format!("bytes from {} to {}", bytes_text(*min), bytes_text(*max))
            }
            Field::Seconds { min, max, .. } => format!("seconds from {min} to {max}"),
            Field::Switch { .. } => "0, 1, false or true".to_owned(),
            Field::Text { .. } | Field::MaybeText { .. } | Field::Texts { .. } => "text".to_owned(),
            Field::Path { .. } => "a path".to_owned(),
            Field::Choice { names, .. } => format!("one of {names}"),
        }
    }

    /// Takes `text` as the value, or says no. The caller knows what to tell the user.
    pub(super) fn set(&self, config: &mut Config, text: &str) -> Result<(), Refused> {
        let text = text.trim();
        match &self.field {
            Field::Count { at, min, max } => *at(config) = ranged(text.parse(), *min, *max)?,
            Field::MaybeCount { at, max } => *at(config) = Some(ranged(text.parse(), 0, *max)?),
            Field::Counts { at, max } => *at(config) = parse_counts(text, *max)?,
            Field::Wide { at } => *at(config) = text.parse().map_err(|_| Refused)?,
            Field::Port { at } => *at(config) = text.parse().map_err(|_| Refused)?,
            Field::Bytes { at, min, max } => {
                let value = u32::try_from(parse_bytes(text)?).map_err(|_| Refused)?;
                *at(config) = ranged(Ok::<_, Refused>(value), *min, *max)?;
            }
            Field::Seconds { at, min, max } => {
                let value: f64 = ranged(text.parse(), *min, *max)?;
                *at(config) = Duration::try_from_secs_f64(value).map_err(|_| Refused)?;
            }
            Field::Switch { at } => *at(config) = parse_switch(text)?,
            Field::Text { at } => text.clone_into(at(config)),
            Field::MaybeText { at } => *at(config) = Some(text.to_owned()),
            Field::Texts { at } => at(config).push(text.to_owned()),
            Field::Path { at } => *at(config) = Some(PathBuf::from(text)),
            Field::Choice { set, .. } => {
                if !set(config, &text.to_ascii_lowercase()) {
                    return Err(Refused);
                }
            }
        }
        Ok(())
    }

    /// The value as text that [`Row::set`] would take; empty if there is none.
    #[must_use]
    pub fn value(&self, config: &Config) -> String {
        // The accessors want a mutable configuration. This runs at start only, so a copy costs
        // nothing.
        let config = &mut config.clone();
        match &self.field {
            Field::Count { at, .. } => at(config).to_string(),
            Field::MaybeCount { at, .. } => at(config).map_or_else(String::new, |v| v.to_string()),
            Field::Counts { at, .. } => counts_text(at(config)),
            Field::Wide { at } => at(config).to_string(),
            Field::Port { at } => at(config).to_string(),
            Field::Bytes { at, .. } => bytes_text(*at(config)),
            Field::Seconds { at, .. } => at(config).as_secs_f64().to_string(),
            Field::Switch { at } => if *at(config) { "1" } else { "0" }.to_owned(),
            Field::Text { at } => at(config).clone(),
            Field::MaybeText { at } => at(config).clone().unwrap_or_default(),
            Field::Texts { at } => at(config).join(" "),
            Field::Path { at } => {
                at(config).as_ref().map_or_else(String::new, |path| path.display().to_string())
            }
            Field::Choice { get, .. } => get(config).to_owned(),
        }
    }

    /// The value for a reader: a secret is only said to be there.
    pub(super) fn shown(&self, config: &Config) -> String {
        let value = self.value(config);
        if self.secret && !value.is_empty() { "(set, not shown)".to_owned() } else { value }
    }
}

/// The text is not a value of this row.
#[derive(Debug)]
pub(super) struct Refused;

fn ranged<T: PartialOrd, E>(value: Result<T, E>, min: T, max: T) -> Result<T, Refused> {
    match value {
        Ok(value) if value >= min && value <= max => Ok(value),
        _ => Err(Refused),
    }
}

fn parse_counts(text: &str, max: u32) -> Result<Vec<u32>, Refused> {
    let one = |text: &str| ranged(text.trim().parse(), 0, max);
    let mut counts: Vec<u32> = text.split(',').map(one).collect::<Result<_, _>>()?;
    counts.sort_unstable();
    if counts.windows(2).any(|pair| pair[0] == pair[1]) {
        return Err(Refused);
    }
    Ok(counts)
}

/// As it would be typed: `0,2`.
pub(super) fn counts_text(counts: &[u32]) -> String {
    let texts: Vec<String> = counts.iter().map(u32::to_string).collect();
    texts.join(",")
}

fn parse_switch(text: &str) -> Result<bool, Refused> {
    match text.to_ascii_lowercase().as_str() {
        "1" | "true" => Ok(true),
        "0" | "false" => Ok(false),
        _ => Err(Refused),
    }
}

/// `4096`, `512K`, `4M`, `1G`; also with `B` or `iB` behind the letter. All are powers of 1024.
fn parse_bytes(text: &str) -> Result<u64, Refused> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, suffix) = text.split_at(digits);
    let shift = match suffix.trim_start().to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        _ => return Err(Refused),
    };
    let number: u64 = number.parse().map_err(|_| Refused)?;
    number.checked_mul(1 << shift).ok_or(Refused)
}

fn bytes_text(bytes: u32) -> String {
    match bytes {
        0 => "0".to_owned(),
        _ if bytes.is_multiple_of(1 << 20) => format!("{}M", bytes >> 20),
        _ if bytes.is_multiple_of(1 << 10) => format!("{}K", bytes >> 10),
        _ => bytes.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn every_default_is_a_value_that_its_own_row_takes() {
        let default = Config::default();
        for row in TABLE {
            let text = row.value(&default);
            if text.is_empty() {
                continue;
            }
            let mut config = Config::default();
            row.set(&mut config, &text).unwrap_or_else(|_| panic!("{} = {text}", row.name()));
            assert_eq!(config, default, "{} = {text}", row.name());
        }
    }

    #[test]
    fn every_example_is_a_value_and_comes_back_as_text() {
        for row in TABLE {
            let mut config = Config::default();
            row.set(&mut config, row.example).unwrap_or_else(|_| panic!("{}", row.name()));
            let mut again = Config::default();
            row.set(&mut again, &row.value(&config)).unwrap();
            assert_eq!(config, again, "{}", row.name());
        }
    }

    #[test]
    fn names_and_flags_occur_once() {
        let mut seen = HashSet::new();
        for row in TABLE {
            assert!(!row.name().is_empty() && !row.meaning.is_empty());
            for name in row.variables().chain(row.flag).chain(row.flag_alias) {
                assert!(seen.insert(name), "{name} occurs twice");
            }
        }
    }

    #[test]
    fn byte_sizes() {
        assert_eq!(parse_bytes("4M").unwrap(), 4 << 20);
        assert_eq!(parse_bytes("512K").unwrap(), 512 << 10);
        assert_eq!(parse_bytes("512 KiB").unwrap(), 512 << 10);
        assert_eq!(parse_bytes("4096000").unwrap(), 4_096_000);
        for wrong in ["", "M", "4X", "-1", "1.5M", "99999999999999999999", "18446744073709551615G"]
        {
            assert!(parse_bytes(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn numbers_out_of_range_or_not_finite_are_refused() {
        let row = TABLE.iter().find(|row| row.variable == "BPS_STALL_TIMEOUT").unwrap();
        for wrong in ["nan", "inf", "-1", "0", "1e300", "", "5s"] {
            assert!(row.set(&mut Config::default(), wrong).is_err(), "{wrong}");
        }
        let mut config = Config::default();
        row.set(&mut config, "2.5").unwrap();
        assert_eq!(config.stall_timeout, Duration::from_millis(2500));
    }
}

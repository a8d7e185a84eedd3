//! Reads flags and variables into a [`Config`], and remembers whence each value came.

use super::known::{ELSEWHERE, find};
use super::origin::{Origin, Source};
use super::table::{Row, TABLE};
use super::{Config, ConfigError, Program, check, document, foreign};
use clap::{Arg, ArgAction, ArgMatches, Command, error::ErrorKind};
use std::collections::HashMap;
use std::ffi::OsString;
use std::io::Write;

/// Set by the launcher for its children: it has already warned about the environment.
const CHECKED: &str = "BPS_ENVIRONMENT_CHECKED";
/// Where the launcher keeps the user's command among the arguments.
const COMMAND: &str = "command";
const PRINT: &str = "print-config";

/// What the command line asked for.
#[derive(Debug)]
pub enum Outcome {
    /// Go ahead.
    Run(Box<Loaded>),
    /// Print this to standard output and leave with 0: `--help`, `--version`, `--print-config`.
    Print(String),
}

/// A configuration that has passed all checks.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// The values.
    pub config: Config,
    /// Whence each value came, in the order of the table; only rows that this program uses.
    pub sources: Vec<Source>,
    /// Lines for standard error, once per job rather than once per rank.
    pub warnings: Vec<String>,
    /// What follows the launcher's flags.
    pub command: Vec<OsString>,
}

impl Loaded {
    /// Whence the value of this variable (or of a flag without one) came.
    #[must_use]
    pub fn origin(&self, name: &str) -> Origin {
        let source = self.sources.iter().find(|source| source.name == name);
        source.map_or(Origin::Default, |source| source.origin.clone())
    }

    /// What the flags said, as variables: a launcher hands them on to its processes this way.
    #[must_use]
    pub fn flags_as_variables(&self) -> Vec<(&'static str, String)> {
        let given = self.sources.iter().filter(|source| matches!(source.origin, Origin::Flag(_)));
        let rows = given.filter_map(|source| TABLE.iter().find(|row| row.name() == source.name));
        rows.filter_map(|row| Some((row.variables().next()?, row.value(&self.config)))).collect()
    }
}

/// Reads the configuration of `program` from `arguments` (without the program's own name) and
/// `environment`.
///
/// Unknown variables cannot be seen through a look-up; [`unknown_variables`] finds them.
pub fn load(
    program: Program,
    arguments: impl IntoIterator<Item = OsString>,
    environment: &dyn Fn(&str) -> Option<String>,
) -> Result<Outcome, ConfigError> {
    let name = OsString::from(program.name());
    let words: Vec<OsString> = std::iter::once(name).chain(arguments).collect();
    let matches = match command(program).try_get_matches_from(&words) {
        Ok(matches) => matches,
        Err(error) => return from_clap(&error),
    };
    let command: Vec<OsString> = match program {
        Program::Launcher => {
            matches.get_many::<OsString>(COMMAND).unwrap_or_default().cloned().collect()
        }
        _ => Vec::new(),
    };
    refuse_option(&words[..words.len() - command.len()], &command)?;
    let mut config = Config::default();
    let mut sources = Vec::with_capacity(TABLE.len());
    for row in TABLE.iter().filter(|row| row.used_by(program)) {
        let origin = fill(row, program, &mut config, &matches, environment)?;
        let value = match origin {
            Origin::Default => row.shown(&Config::default()),
            _ => row.shown(&config),
        };
        sources.push(Source { name: row.name(), value, origin });
    }
    let checked = check::check(program, &mut config, &sources);
    refresh(&mut sources, &config);
    if matches.get_flag(PRINT) {
        let complaint = checked.err().map(|error| error.to_string());
        return Ok(Outcome::Print(document::report(program, &sources, complaint.as_deref())));
    }
    let mut warnings = checked?;
    if environment(CHECKED).is_none() {
        warnings.extend(without_effect(environment));
    }
    Ok(Outcome::Run(Box::new(Loaded { config, sources, warnings, command })))
}

/// Reads a program's configuration from this process's environment, and prints what is to be
/// printed. The error is the code with which to leave.
pub fn open(
    program: Program,
    arguments: impl IntoIterator<Item = OsString>,
) -> Result<Loaded, i32> {
    let name = program.name();
    match load(program, arguments, &variable) {
        Ok(Outcome::Run(mut loaded)) => {
            loaded.warnings.extend(unknown_here());
            for warning in &loaded.warnings {
                say(name, &format!("warning: {warning}"));
            }
            Ok(*loaded)
        }
        Ok(Outcome::Print(text)) => {
            // A reader that has gone away (`--help | head -1`) is no failure.
            let _ = std::io::stdout().write_all(text.as_bytes());
            Err(0)
        }
        Err(error) => {
            say(name, &format!("error: {error}"));
            Err(ConfigError::EXIT_CODE)
        }
    }
}

/// One line for the user. That nobody may read it is no reason to stop.
fn say(program: &str, text: &str) {
    let _ = writeln!(std::io::stderr(), "{program}: {text}");
}

/// Reads a worker's configuration from this process's environment. The caller shows the warnings,
/// on rank 0 only.
pub fn from_environment() -> Result<Loaded, ConfigError> {
    from_environment_with(&HashMap::new())
}

/// As [`from_environment`], with settings that beat the environment: what the variables of another
/// launcher mean here.
pub fn from_environment_with(settings: &HashMap<String, String>) -> Result<Loaded, ConfigError> {
    let look_up = |name: &str| settings.get(name).cloned().or_else(|| variable(name));
    match load(Program::Worker, [], &look_up)? {
        Outcome::Run(mut loaded) => {
            loaded.warnings.extend(unknown_here());
            Ok(*loaded)
        }
        Outcome::Print(_) => unreachable!("there are no arguments that could ask for it"),
    }
}

/// One line for each name with a prefix of ours that nothing reads, with the name that was probably
/// meant.
pub fn unknown_variables(names: impl IntoIterator<Item = String>) -> Vec<String> {
    const PREFIXES: [&str; 4] = ["BPS_", "BYTEPS_", "BYTESCHEDULER_", "DMLC_"];
    let ours = |name: &String| PREFIXES.iter().any(|prefix| name.starts_with(prefix));
    let mut unknown: Vec<String> =
        names.into_iter().filter(ours).filter(|n| !is_known(n)).collect();
    unknown.sort();
    unknown.into_iter().map(|name| unknown_line(&name)).collect()
}

fn unknown_here() -> Vec<String> {
    if variable(CHECKED).is_some() {
        return Vec::new();
    }
    unknown_variables(std::env::vars_os().map(|(name, _)| name.to_string_lossy().into_owned()))
}

fn variable(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

fn is_known(name: &str) -> bool {
    TABLE.iter().any(|row| row.variables().any(|own| own == name))
        || find(name).is_some()
        || ELSEWHERE.contains(&name)
}

fn unknown_line(name: &str) -> String {
    let nearest = TABLE
        .iter()
        .flat_map(Row::variables)
        .map(|candidate| (distance(name, candidate), candidate))
        .min()
        .filter(|&(distance, candidate)| distance <= 2.max(candidate.len() / 6));
    match nearest {
        Some((_, candidate)) => format!("{name} is not known here; did you mean {candidate}?"),
        None => format!("{name} is not known here and has no effect"),
    }
}

/// Edits (insert, delete, replace) between two names.
fn distance(left: &str, right: &str) -> usize {
    let mut row: Vec<usize> = (0..=right.len()).collect();
    for (i, a) in left.bytes().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, b) in right.bytes().enumerate() {
            let replaced = diagonal + usize::from(a != b);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[right.len()]
}

fn without_effect(environment: &dyn Fn(&str) -> Option<String>) -> Vec<String> {
    let mut lines = Vec::new();
    for known in super::known::KNOWN {
        for name in known.names {
            if let Some(value) = environment(name)
                && !value.is_empty()
                && !known.harmless.contains(&value.as_str())
            {
                lines.push(format!("{name} has no effect here: {}", known.reason));
            }
        }
    }
    lines
}

/// Refuses a command that looks like an option: it is one that we do not have, unless `--` stands
/// before it.
fn refuse_option(before: &[OsString], command: &[OsString]) -> Result<(), ConfigError> {
    let Some(word) = command.first().map(|word| word.to_string_lossy()) else { return Ok(()) };
    if !word.starts_with('-') || before.last().is_some_and(|last| last == "--") {
        return Ok(());
    }
    let name = word.split('=').next().unwrap_or_default();
    let bare = name.trim_start_matches('-');
    let own = TABLE.iter().filter(|row| row.used_by(Program::Launcher));
    let flags = own.flat_map(|row| row.flag.into_iter().chain(row.flag_alias));
    let nearest = || {
        let flags = flags.chain([PRINT, "help", "version"]);
        let near = flags.map(|flag| (distance(bare, flag), flag)).min();
        near.filter(|&(distance, flag)| distance <= 2.max(flag.len() / 4))
    };
    let meant = match (foreign::option(bare), nearest()) {
        (Some(ours), _) => ours.to_owned(),
        (None, Some((_, flag))) => format!("did you mean --{flag}?"),
        (None, None) => "see bpslaunch --help".to_owned(),
    };
    Err(ConfigError::CommandLine(format!(
        "there is no option {name}; {meant} (a command that begins with a dash has -- before it)"
    )))
}

/// Sets the row's field from the flag, else from the first of its variables that is set and not
/// empty.
fn fill(
    row: &Row,
    program: Program,
    config: &mut Config,
    matches: &ArgMatches,
    environment: &dyn Fn(&str) -> Option<String>,
) -> Result<Origin, ConfigError> {
    if let Some(flag) = row.flag
        && let Some(texts) = matches.get_many::<String>(flag)
    {
        for text in texts {
            let is_number = text.trim().parse::<u64>().is_ok();
            if let Some(at) = row.or_text.filter(|_| program == Program::Launcher && !is_number) {
                *at(config) = Some(text.clone());
                continue;
            }
            set(row, config, text, format!("--{flag}"), &format!("--{flag}={}", row.example))?;
        }
        return Ok(Origin::Flag(flag));
    }
    for name in row.variables() {
        // An empty variable counts as unset: scripts write `DMLC_INTERFACE= command` for that.
        let is_set = |text: &String| row.keeps_empty || !text.trim().is_empty();
        if let Some(text) = environment(name).filter(is_set) {
            set(row, config, &text, name.to_owned(), &format!("{name}={}", row.example))?;
            return Ok(Origin::Variable(name));
        }
    }
    Ok(Origin::Default)
}

/// Takes the values as they are after the checks: one row may have changed another's field.
fn refresh(sources: &mut [Source], config: &Config) {
    for source in sources {
        let row = TABLE.iter().find(|row| row.name() == source.name);
        let value = row.map_or_else(String::new, |row| row.shown(config));
        if value != source.value && source.origin == Origin::Default {
            source.origin = Origin::Implied;
        }
        source.value = value;
    }
}

fn set(
    row: &Row,
    config: &mut Config,
    text: &str,
    origin: String,
    example: &str,
) -> Result<(), ConfigError> {
    row.set(config, text).map_err(|_| ConfigError::Value {
        origin,
        value: text.to_owned(),
        allowed: row.allowed(),
        example: example.to_owned(),
    })
}

fn from_clap(error: &clap::Error) -> Result<Outcome, ConfigError> {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => Ok(Outcome::Print(error.to_string())),
        _ => {
            let text = error.to_string();
            let text = text.trim_end();
            Err(ConfigError::CommandLine(text.strip_prefix("error: ").unwrap_or(text).to_owned()))
        }
    }
}

fn command(program: Program) -> Command {
    let mut command = Command::new(program.name())
        .version(env!("CARGO_PKG_VERSION"))
        .about(about(program))
        .after_help("Every variable is described in docs/env.md. A flag beats its variable.")
        .arg(
            Arg::new(PRINT)
                .long(PRINT)
                .action(ArgAction::SetTrue)
                .help("Print every value and whence it came, and leave"),
        );
    // What only the launcher has is what its users look for.
    let (own, shared): (Vec<&Row>, Vec<&Row>) = TABLE
        .iter()
        .filter(|row| row.used_by(program))
        .partition(|row| row.group == super::table::Group::Launcher);
    for row in own.into_iter().chain(shared) {
        if let Some(flag) = row.flag {
            command = command.arg(argument(row, flag));
        }
    }
    if program == Program::Launcher {
        command = command.override_usage("bpslaunch [OPTIONS] [--] COMMAND...").arg(
            Arg::new(COMMAND)
                .value_name("COMMAND")
                .num_args(0..)
                .trailing_var_arg(true)
                .allow_hyphen_values(true)
                .value_parser(clap::value_parser!(OsString))
                .help("The training command and its arguments"),
        );
    }
    command
}

fn about(program: Program) -> &'static str {
    match program {
        Program::Worker => "A training process",
        Program::Server => "Sums gradients for the workers of a job",
        Program::Scheduler => "Brings the nodes of a job together and watches over them",
        Program::Top => "Shows a running job as a live table, from the metrics of its scheduler",
        Program::Launcher => {
            "Starts the processes of this machine from DMLC_* variables, or a whole job: on this \
             machine with --local, on several with --hosts"
        }
    }
}

fn argument(row: &'static Row, flag: &'static str) -> Arg {
    let variable = match row.variable {
        "" => String::new(),
        name => format!(" [{name}]"),
    };
    let default = match row.value(&Config::default()) {
        text if text.is_empty() => String::new(),
        text => format!(" [default: {text}]"),
    };
    let mut argument = Arg::new(flag)
        .long(flag)
        .value_name(row.placeholder())
        .help_heading(row.group.title())
        .help(format!("{}{variable}{default}", row.meaning));
    if let Some(alias) = row.flag_alias {
        argument = argument.visible_alias(alias);
    }
    if let Some(letter) = row.short {
        argument = argument.short(letter);
    }
    if row.is_list() {
        argument = argument.action(ArgAction::Append);
    }
    if row.is_switch() {
        // `--pin` alone means yes; a value must be attached, or it would swallow the next word.
        argument = argument.num_args(0..=1).require_equals(true).default_missing_value("1");
    }
    argument
}

#[cfg(test)]
mod tests;

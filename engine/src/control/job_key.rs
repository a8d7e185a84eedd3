//! Where the job key comes from: a variable, a file, or chance. It never comes from the command
//! line, where every user of the machine could read it.

use crate::config::{Config, decode_key};
use crate::proto::handshake::{JobKey, NONCE_BYTES, Nonce, PROOF_BYTES};
use sha2::{Digest, Sha256};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Why there is no job key.
#[derive(Debug, thiserror::Error)]
pub enum JobKeyError {
    /// The text is no key.
    #[error(
        "the key in {source_name} {reason}: make one with `head -c 32 /dev/urandom | xxd -p -c 64`"
    )]
    Malformed {
        /// The variable or file.
        source_name: String,
        /// What is wrong, without showing it.
        reason: String,
    },
    /// The file cannot be read.
    #[error("the job key file {path} cannot be read: {error}: check BPS_JOB_KEY_FILE")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        error: std::io::Error,
    },
    /// Everybody on the machine may read or change the file.
    #[error(
        "the job key file {path} is open to every user (mode {mode:03o}): run `chmod 600 \
         {path}`, or set `defaultMode: 0400` where it is a mounted secret"
    )]
    Exposed {
        /// The file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// Two sources hold two keys.
    #[error("BPS_JOB_KEY and the file {path} hold different keys: set only one of them")]
    Ambiguous {
        /// The file.
        path: PathBuf,
    },
    /// Encryption with the key that everybody knows.
    #[error(
        "BPS_ENCRYPT=1, but the job has no key: make one with `head -c 32 /dev/urandom | xxd -p \
         -c 64 > job.key; chmod 600 job.key`, and set BPS_JOB_KEY_FILE to it on every node"
    )]
    NoneToEncrypt,
    /// The kernel gave no random bytes.
    #[error("the kernel gave no random bytes: {0}")]
    NoRandom(getrandom::Error),
}

/// Bytes read of a key file: more than a key and its line end, so that a wrong file is noticed.
const FILE_BYTES_MAX: u64 = 4096;

impl JobKey {
    /// The key that the configuration names, or the [open](JobKey::open) one if it names none.
    ///
    /// # Errors
    /// The key is malformed, or its file cannot be read or is open to every user; or there is none,
    /// and lanes are to be encrypted.
    pub fn load(config: &Config) -> Result<JobKey, JobKeyError> {
        let variable = match &config.job_key {
            Some(text) => Some(parse(text, "BPS_JOB_KEY")?),
            None => None,
        };
        let file = match &config.job_key_file {
            Some(path) => Some((read(path)?, path)),
            None => None,
        };
        let key = match (variable, file) {
            (Some(variable), Some((file, path))) if variable != file => {
                return Err(JobKeyError::Ambiguous { path: path.clone() });
            }
            (Some(key), _) | (None, Some((key, _))) => key,
            (None, None) => JobKey::open(),
        };
        if config.encrypt && key.is_open() {
            return Err(JobKeyError::NoneToEncrypt);
        }
        Ok(key)
    }

    /// A new key by chance, for a job that starts all of its processes itself.
    ///
    /// # Errors
    /// The kernel gave no random bytes.
    pub fn mint() -> Result<JobKey, JobKeyError> {
        let mut bytes = [0; PROOF_BYTES];
        getrandom::fill(&mut bytes).map_err(JobKeyError::NoRandom)?;
        Ok(JobKey::from_bytes(bytes))
    }
}

/// A fresh nonce.
pub(super) fn nonce() -> std::io::Result<Nonce> {
    let mut bytes = [0; NONCE_BYTES];
    getrandom::fill(&mut bytes).map_err(|error| std::io::Error::other(error.to_string()))?;
    Ok(bytes)
}

fn read(path: &Path) -> Result<JobKey, JobKeyError> {
    let unreadable = |error| JobKeyError::Unreadable { path: path.to_owned(), error };
    let file = std::fs::File::open(path).map_err(unreadable)?;
    // Asked of the open file, not of its name, so that it is the file that is read.
    let mode = file.metadata().map_err(unreadable)?.mode() & 0o777;
    if mode & 0o006 != 0 {
        return Err(JobKeyError::Exposed { path: path.to_owned(), mode });
    }
    let mut text = Vec::new();
    file.take(FILE_BYTES_MAX).read_to_end(&mut text).map_err(unreadable)?;
    parse(&String::from_utf8_lossy(&text), &path.display().to_string())
}

fn parse(text: &str, source_name: &str) -> Result<JobKey, JobKeyError> {
    let key = decode_key(text)
        .map_err(|reason| JobKeyError::Malformed { source_name: source_name.to_owned(), reason })?;
    // A key of another length is brought to this one; every node does the same.
    let bytes = <[u8; PROOF_BYTES]>::try_from(key.as_slice())
        .unwrap_or_else(|_| Sha256::digest(&key).into());
    Ok(JobKey::from_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    /// A file that goes away with its test.
    struct Temporary(PathBuf);

    impl Temporary {
        fn new(name: &str, content: &str, mode: u32) -> Temporary {
            let path = std::env::temp_dir().join(format!("bps-{}-{name}", std::process::id()));
            std::fs::write(&path, content).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            Temporary(path)
        }
    }

    impl Drop for Temporary {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }

    fn with_file(file: &Temporary) -> Config {
        Config { job_key_file: Some(file.0.clone()), ..Config::default() }
    }

    #[test]
    fn a_key_goes_through_a_variable_and_a_file() {
        let key = JobKey::mint().unwrap();
        assert!(!key.is_open() && key != JobKey::mint().unwrap());
        let hex = key.expose_hex();
        let variable = Config { job_key: Some(hex.clone()), ..Config::default() };
        assert_eq!(JobKey::load(&variable).unwrap(), key);
        let file = Temporary::new("key", &format!("{hex}\n"), 0o600);
        assert_eq!(JobKey::load(&with_file(&file)).unwrap(), key);
        let both = Config { job_key: Some("ab".repeat(32)), ..with_file(&file) };
        assert!(matches!(JobKey::load(&both), Err(JobKeyError::Ambiguous { .. })));
        assert_eq!(JobKey::load(&Config::default()).unwrap(), JobKey::open());
    }

    #[test]
    fn a_file_that_all_may_read_is_refused_with_the_remedy() {
        let file = Temporary::new("exposed", &"ab".repeat(32), 0o644);
        let error = JobKey::load(&with_file(&file)).unwrap_err().to_string();
        assert!(error.contains("mode 644") && error.contains("chmod 600"), "{error}");
    }

    #[test]
    fn what_is_no_key_is_not_shown() {
        for wrong in ["hunter2", "", "abc", &"ab".repeat(8), &"ab".repeat(65), &"a".repeat(63)] {
            let config = Config { job_key: Some(wrong.to_owned()), ..Config::default() };
            let error = JobKey::load(&config).unwrap_err().to_string();
            assert!(error.contains("the key in BPS_JOB_KEY") && error.contains("xxd"), "{error}");
            assert!(wrong.is_empty() || !error.contains(&format!(" {wrong}")), "{error}");
        }
        let missing = Config { job_key_file: Some("/nowhere/key".into()), ..Config::default() };
        assert!(matches!(JobKey::load(&missing), Err(JobKeyError::Unreadable { .. })));
    }

    #[test]
    fn without_a_key_nothing_is_encrypted() {
        let zeros = "00".repeat(PROOF_BYTES);
        for (job_key, expected) in
            [(None, true), (Some(zeros), true), (Some("ab".repeat(32)), false)]
        {
            let config = Config { job_key, encrypt: true, ..Config::default() };
            let key = JobKey::load(&config);
            assert_eq!(matches!(key, Err(JobKeyError::NoneToEncrypt)), expected, "{key:?}");
        }
        let text = JobKeyError::NoneToEncrypt.to_string();
        assert!(text.contains("xxd") && text.contains("BPS_JOB_KEY_FILE"), "{text}");
    }

    #[test]
    fn keys_of_other_lengths_differ_too() {
        let load = |text: String| {
            JobKey::load(&Config { job_key: Some(text), ..Config::default() }).unwrap()
        };
        assert_ne!(load("ab".repeat(16)), load("ab".repeat(17)));
        assert_eq!(load("ab".repeat(64)), load("AB".repeat(64)));
    }
}

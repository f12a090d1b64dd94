//! The Noise channel: hybrid IK handshake, then records.
//!
//! The harness initiates and pins the executor's keys. Record `n` of a direction has nonce `n` and
//! travels as segment `n`; [`RecordCipher`] refuses any other order, so no nonce is used twice.

use std::fmt;

use bytes::BytesMut;
use clatter::bytearray::ByteArray;
use clatter::cipherstate::CipherState;
use clatter::crypto::dh::X25519;
use clatter::crypto::hash::Sha256;
use clatter::crypto::kem::rust_crypto_ml_kem::MlKem768;
use clatter::handshakepattern::noise_hybrid_ik;
use clatter::traits::{Handshaker, Hash};
use clatter::{HybridHandshakeCore, HybridHandshakeParams};
use zeroize::Zeroizing;

use crate::aes_gcm::AesGcm;
use crate::config::{MAX_NOISE_LEN, TAG_LEN};
use crate::entropy::{Entropy, EntropyError, HandshakeRng, with_seed};
use crate::key::{KeyError, NoiseIdentity, NoisePublicKey, SUITE, check_mlkem768};

type Handshake = HybridHandshakeCore<X25519, MlKem768, MlKem768, AesGcm, Sha256, HandshakeRng>;
type Params<'a> = HybridHandshakeParams<'a, X25519, MlKem768, MlKem768>;

const PROLOGUE_LABEL: &str = "codex-exec-server-relay-noise/v1";

/// What a harness got from the registry and shows to the executor. Wiped on drop, never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Authorization(Zeroizing<String>);

impl Authorization {
    /// Wraps the registry's `harness_key_authorization`.
    pub fn new(text: String) -> Self {
        Self(Zeroizing::new(text))
    }

    /// The secret itself, for the call that checks it.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Authorization {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Authorization(…)")
    }
}

/// Why a handshake failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum HandshakeError {
    /// The message is shorter than its fixed part or longer than Noise allows.
    #[error("the handshake message has an impossible length of {0} bytes")]
    Length(usize),
    /// The message does not authenticate: another key, environment, registration or stream.
    #[error("the handshake message was not made for this key and stream")]
    Rejected,
    /// The peer authenticated with a key that must not be used.
    #[error("the peer's key is not usable: {0}")]
    PeerKey(#[from] KeyError),
    /// The authorization in the first message is empty, too long or not UTF-8.
    #[error("the authorization is not text of 1..={max} bytes")]
    Authorization {
        /// [`Config::max_authorization_len`](crate::Config).
        max: usize,
    },
    /// The executor's reply carries a payload; it must be empty.
    #[error("the handshake reply carries a payload")]
    UnexpectedPayload,
    /// The random source failed.
    #[error(transparent)]
    Entropy(#[from] EntropyError),
}

/// The ids that both sides bind the handshake to.
#[derive(Clone, Copy)]
pub(crate) struct Binding<'a> {
    pub(crate) environment_id: &'a str,
    pub(crate) registration_id: &'a str,
    pub(crate) stream_id: &'a str,
}

impl Binding<'_> {
    fn prologue(&self) -> Vec<u8> {
        let parts = [PROLOGUE_LABEL, self.environment_id, self.registration_id, self.stream_id];
        let mut out = Vec::new();
        for part in parts {
            out.extend_from_slice(&(part.len() as u64).to_be_bytes());
            out.extend_from_slice(part.as_bytes());
        }
        out
    }
}

/// A digest that distinguishes a duplicated handshake message from a different one.
pub(crate) fn digest(message: &[u8]) -> [u8; 32] {
    let mut out = [0; 32];
    out.copy_from_slice(Sha256::hash(message).as_slice());
    out
}

/// The harness's side, waiting for the reply.
pub(crate) struct Initiator(Box<Handshake>);

impl Initiator {
    /// Writes the first message, which carries the authorization.
    pub(crate) fn start(
        identity: &NoiseIdentity,
        executor: &NoisePublicKey,
        binding: Binding<'_>,
        authorization: &Authorization,
        entropy: &mut dyn Entropy,
    ) -> Result<(Self, Vec<u8>), HandshakeError> {
        let prologue = binding.prologue();
        let params = Params::new(noise_hybrid_ik(), true)
            .with_prologue(&prologue)
            .with_s(identity.dh())
            .with_s_kem(identity.kem())
            .with_rs(*executor.x25519())
            .with_rs_kem(executor.kem_public());
        let mut handshake = build(params, entropy)?;
        let message = write(&mut handshake, authorization.expose().as_bytes())?;
        Ok((Self(handshake), message))
    }

    /// Reads the reply, whose payload must be empty.
    pub(crate) fn finish(mut self, reply: &[u8]) -> Result<RecordCipher, HandshakeError> {
        let payload = read(&mut self.0, reply, 0)?;
        if !payload.is_empty() {
            return Err(HandshakeError::UnexpectedPayload);
        }
        RecordCipher::new(*self.0, true)
    }
}

/// The executor's side, waiting for a verdict on the harness's key.
pub(crate) struct Responder(Box<Handshake>);

impl Responder {
    /// Reads the first message: the authenticated key of the harness and its authorization.
    pub(crate) fn read(
        identity: &NoiseIdentity,
        binding: Binding<'_>,
        message: &[u8],
        max_authorization_len: usize,
        entropy: &mut dyn Entropy,
    ) -> Result<(Self, NoisePublicKey, Authorization), HandshakeError> {
        let prologue = binding.prologue();
        let params = Params::new(noise_hybrid_ik(), false)
            .with_prologue(&prologue)
            .with_s(identity.dh())
            .with_s_kem(identity.kem());
        let mut handshake = build(params, entropy)?;
        let payload = read(&mut handshake, message, max_authorization_len)?;

        let bad = HandshakeError::Authorization { max: max_authorization_len };
        let text = std::str::from_utf8(&payload).map_err(|_| bad)?;
        if text.is_empty() {
            return Err(bad);
        }
        let authorization = Authorization::new(text.to_owned());

        let remote = handshake.get_remote_static().ok_or(HandshakeError::Rejected)?;
        let key = NoisePublicKey::new(SUITE, remote.dh(), remote.kem().as_slice())?;
        let ephemeral = handshake.get_remote_ephemeral().ok_or(HandshakeError::Rejected)?;
        check_mlkem768(ephemeral.kem().as_slice())?;
        Ok((Self(handshake), key, authorization))
    }

    /// Writes the reply and returns the record cipher.
    pub(crate) fn accept(mut self) -> Result<(Vec<u8>, RecordCipher), HandshakeError> {
        let reply = write(&mut self.0, &[])?;
        Ok((reply, RecordCipher::new(*self.0, false)?))
    }
}

fn build(params: Params<'_>, entropy: &mut dyn Entropy) -> Result<Box<Handshake>, HandshakeError> {
    with_seed(entropy, || Handshake::new(params))?
        .map(Box::new)
        .map_err(|_| HandshakeError::Rejected)
}

fn write(handshake: &mut Handshake, payload: &[u8]) -> Result<Vec<u8>, HandshakeError> {
    let overhead = handshake.get_next_message_overhead().map_err(|_| HandshakeError::Rejected)?;
    let len = overhead + payload.len();
    if len > MAX_NOISE_LEN {
        return Err(HandshakeError::Length(len));
    }
    let mut message = vec![0; len];
    handshake.write_message(payload, &mut message).map_err(|_| HandshakeError::Rejected)?;
    Ok(message)
}

fn read(
    handshake: &mut Handshake,
    message: &[u8],
    max_payload_len: usize,
) -> Result<Zeroizing<Vec<u8>>, HandshakeError> {
    let overhead = handshake.get_next_message_overhead().map_err(|_| HandshakeError::Rejected)?;
    // Longer messages would make the library panic; shorter ones cannot be whole.
    if !(overhead..=overhead + max_payload_len).contains(&message.len())
        || message.len() > MAX_NOISE_LEN
    {
        return Err(HandshakeError::Length(message.len()));
    }
    let mut payload = Zeroizing::new(vec![0; message.len() - overhead]);
    let len =
        handshake.read_message(message, &mut payload).map_err(|_| HandshakeError::Rejected)?;
    payload.truncate(len);
    Ok(payload)
}

/// A record with a wrong number, a wrong length or a wrong tag.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the record at segment {seq} is not authentic")]
pub struct RecordError {
    /// The segment it came in.
    pub seq: u32,
}

/// Both directions of an established channel.
pub(crate) struct RecordCipher {
    sealing: CipherState<AesGcm>,
    opening: CipherState<AesGcm>,
}

impl RecordCipher {
    fn new(handshake: Handshake, initiator: bool) -> Result<Self, HandshakeError> {
        let transport = handshake.finalize().map_err(|_| HandshakeError::Rejected)?;
        let both = transport.take();
        Ok(if initiator {
            Self { sealing: both.initiator_to_responder, opening: both.responder_to_initiator }
        } else {
            Self { sealing: both.responder_to_initiator, opening: both.initiator_to_responder }
        })
    }

    /// Encrypts in place: `record` is the plaintext followed by room for the tag.
    pub(crate) fn seal(&mut self, seq: u32, record: &mut [u8]) -> Result<(), RecordError> {
        let error = RecordError { seq };
        let plaintext_len = record.len().checked_sub(TAG_LEN).ok_or(error)?;
        if record.len() > MAX_NOISE_LEN || self.sealing.get_nonce() != u64::from(seq) {
            return Err(error);
        }
        self.sealing
            .encrypt_with_ad_in_place(&[], record, plaintext_len)
            .map(|_| ())
            .map_err(|_| error)
    }

    /// Decrypts `record` onto the end of `out`; leaves `out` unchanged on failure.
    pub(crate) fn open(
        &mut self,
        seq: u32,
        record: &[u8],
        out: &mut BytesMut,
    ) -> Result<(), RecordError> {
        let error = RecordError { seq };
        if record.len() > MAX_NOISE_LEN || self.opening.get_nonce() != u64::from(seq) {
            return Err(error);
        }
        let start = out.len();
        out.extend_from_slice(record);
        let opened = self.opening.decrypt_with_ad_in_place(&[], &mut out[start..], record.len());
        out.truncate(start + opened.as_ref().map_or(0, |len| *len));
        opened.map(|_| ()).map_err(|_| error)
    }
}

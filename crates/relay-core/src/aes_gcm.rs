//! AES-256-GCM for the Noise channel, by `ring`: the same bytes as any other, several times faster
//! than the cipher that comes with the Noise library, and every record pays for it twice.
//!
//! Invariant: between two messages nothing is kept but the key, which is wiped when it is dropped;
//! the key's schedule is made for each message anew, which costs little.

use clatter::bytearray::SensitiveByteArray;
use clatter::error::{CipherError, CipherResult};
use clatter::traits::{Cipher, CryptoComponent};
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, Tag, UnboundKey};
use ring::error::Unspecified;

use crate::config::TAG_LEN;

/// The cipher named `AESGCM` in the suite's name.
#[derive(Clone)]
pub(crate) struct AesGcm;

impl CryptoComponent for AesGcm {
    fn name() -> &'static str {
        "AESGCM"
    }
}

type Key = SensitiveByteArray<[u8; 32]>;

fn schedule(key: &Key) -> Result<LessSafeKey, Unspecified> {
    Ok(LessSafeKey::new(UnboundKey::new(&AES_256_GCM, &**key)?))
}

/// As Noise has it: 32 zero bits, then the number in big-endian.
fn nonce(number: u64) -> Nonce {
    let mut bytes = [0; 12];
    bytes[4..].copy_from_slice(&number.to_be_bytes());
    Nonce::assume_unique_for_key(bytes)
}

fn seal(key: &Key, number: u64, ad: &[u8], in_out: &mut [u8]) -> Result<Tag, Unspecified> {
    schedule(key)?.seal_in_place_separate_tag(nonce(number), Aad::from(ad), in_out)
}

fn open(key: &Key, number: u64, ad: &[u8], in_out: &mut [u8], tag: &[u8]) -> CipherResult<()> {
    let opened = Tag::try_from(tag).and_then(|tag| {
        schedule(key)?
            .open_in_place_separate_tag(nonce(number), Aad::from(ad), tag, in_out, 0..)
            .map(|_| ())
    });
    opened.map_err(|Unspecified| CipherError::Decrypt)
}

impl Cipher for AesGcm {
    type Key = Key;

    fn tag_len() -> usize {
        TAG_LEN
    }

    fn encrypt(
        key: &Key,
        number: u64,
        ad: &[u8],
        plaintext: &[u8],
        out: &mut [u8],
    ) -> CipherResult<()> {
        out.get_mut(..plaintext.len()).ok_or(CipherError::Encrypt)?.copy_from_slice(plaintext);
        Self::encrypt_in_place(key, number, ad, out, plaintext.len()).map(|_| ())
    }

    fn encrypt_in_place(
        key: &Key,
        number: u64,
        ad: &[u8],
        in_out: &mut [u8],
        plaintext_len: usize,
    ) -> CipherResult<usize> {
        let split = in_out.split_at_mut_checked(plaintext_len);
        let (text, rest) = split.ok_or(CipherError::Encrypt)?;
        let tag_out = rest.get_mut(..TAG_LEN).ok_or(CipherError::Encrypt)?;
        let tag = seal(key, number, ad, text).map_err(|Unspecified| CipherError::Encrypt)?;
        tag_out.copy_from_slice(tag.as_ref());
        Ok(plaintext_len + TAG_LEN)
    }

    fn decrypt(
        key: &Key,
        number: u64,
        ad: &[u8],
        ciphertext: &[u8],
        out: &mut [u8],
    ) -> CipherResult<()> {
        let (text, tag) = ciphertext.split_at_checked(out.len()).ok_or(CipherError::Decrypt)?;
        out.copy_from_slice(text);
        open(key, number, ad, out, tag)
    }

    fn decrypt_in_place(
        key: &Key,
        number: u64,
        ad: &[u8],
        in_out: &mut [u8],
        ciphertext_len: usize,
    ) -> CipherResult<usize> {
        let ciphertext = in_out.get_mut(..ciphertext_len).ok_or(CipherError::Decrypt)?;
        let (text, tag) =
            ciphertext.split_last_chunk_mut::<TAG_LEN>().ok_or(CipherError::Decrypt)?;
        open(key, number, ad, text, tag)?;
        Ok(text.len())
    }
}

#[cfg(test)]
mod tests {
    use clatter::bytearray::ByteArray as _;
    use clatter::crypto::cipher::AesGcm as Other;

    use super::*;

    /// Every length around a block, a few records, and what the other implementation makes of it.
    #[test]
    fn ciphertext_matches_the_reference_implementation() {
        let key = Key::from_slice(&[7; 32]);
        for (number, len) in [0, 1, 15, 16, 17, 255, 4096, 60 << 10].into_iter().enumerate() {
            let number = u64::MAX - number as u64;
            let plain: Vec<u8> = (0..len).map(|n| n as u8).collect();
            let (mut ours, mut theirs) = (vec![0; len + TAG_LEN], vec![0; len + TAG_LEN]);
            AesGcm::encrypt(&key, number, b"ad", &plain, &mut ours).unwrap();
            Other::encrypt(&key, number, b"ad", &plain, &mut theirs).unwrap();
            assert_eq!(ours, theirs);

            let mut back = vec![0; len];
            AesGcm::decrypt(&key, number, b"ad", &theirs, &mut back).unwrap();
            assert_eq!(back, plain);
            let opened = AesGcm::decrypt_in_place(&key, number, b"ad", &mut theirs, len + TAG_LEN);
            assert_eq!((opened.unwrap(), &theirs[..len]), (len, &plain[..]));

            ours[len / 2] ^= 1;
            AesGcm::decrypt(&key, number, b"ad", &ours, &mut back).unwrap_err();
        }
    }

    #[test]
    fn impossible_lengths_are_rejected() {
        let key = Key::from_slice(&[7; 32]);
        let mut room = [0; TAG_LEN];
        AesGcm::encrypt(&key, 0, &[], b"x", &mut room).unwrap_err();
        AesGcm::encrypt(&key, 0, &[], &[0; 20], &mut room).unwrap_err();
        AesGcm::encrypt_in_place(&key, 0, &[], &mut room, 1).unwrap_err();
        AesGcm::encrypt_in_place(&key, 0, &[], &mut room, 17).unwrap_err();
        AesGcm::decrypt(&key, 0, &[], &[0; 17], &mut room).unwrap_err();
        AesGcm::decrypt_in_place(&key, 0, &[], &mut room, TAG_LEN - 1).unwrap_err();
        AesGcm::decrypt_in_place(&key, 0, &[], &mut room, 100).unwrap_err();
    }
}

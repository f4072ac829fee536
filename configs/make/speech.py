"""Makes the folder `speech` of spectrograms of 1.92 s from the prompts of a telephone system: pip install scipy.

    apt-get download asterisk-core-sounds-{en,es,fr,it,ru}-wav
    for package in asterisk-*.deb; do dpkg -x $package sounds; done
    python configs/make/speech.py sounds/usr/share/asterisk/sounds

Every fifth recording is held out.
"""

import sys
from pathlib import Path

import numpy as np
from scipy.io import wavfile
from scipy.signal import spectrogram

for folder in sorted(Path(sys.argv[1]).iterdir()):
    for number, file in enumerate(sorted(folder.rglob("*.wav"))):
        rate, sound = wavfile.read(file)  # 8 kHz, 16 bits
        if len(sound) < 1.92 * rate:
            continue
        _, _, power = spectrogram(sound / 32768, rate, nperseg=256, noverlap=176)  # a column each 10 ms
        decibels = 10 * np.log10(power[:0:-1] / power.max() + 1e-10)  # high tones on top
        out = Path("speech") / ("train" if number % 5 else "test") / folder.name[:2]
        out.mkdir(parents=True, exist_ok=True)
        for start in range(0, decibels.shape[1] - 191, 192):
            np.save(out / f"{number:03d}_{start:04d}.npy", decibels[:, start : start + 192].astype(np.float32))

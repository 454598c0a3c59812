#!/usr/bin/env bash
# Create a certificate authority for the federation, and the coordinator's certificate.
#   certificates.sh FOLDER NAME-OR-ADDRESS...     the address for hospitals, such as fl.example.org
# FOLDER/ca.key stays offline; ca.crt goes to every hospital; server.pem and server.key to the SuperLink.
# Run again, with ca.key back in place, it writes a new server certificate of the same authority.
set -euo pipefail
folder=$1
shift
umask 077
mkdir -p "$folder"
cd "$folder"
names=""
for name in "$@"; do
  kind=DNS
  [[ $name =~ ^[0-9.]+$|: ]] && kind=IP
  names+="${names:+,}$kind:$name"
done
if [[ -e ca.crt && ! -e ca.key ]]; then
  echo "$folder/ca.key does not exist; bring it back while this script runs, or choose another folder" >&2
  exit 1
fi
if [[ ! -e ca.key ]]; then
  openssl ecparam -name secp384r1 -genkey -noout -out ca.key
  openssl req -x509 -new -key ca.key -sha384 -days 1825 -subj "/CN=FedDPSD federation" \
    -addext "basicConstraints=critical,CA:TRUE" -addext "keyUsage=critical,keyCertSign,cRLSign" -out ca.crt
fi
openssl ecparam -name secp384r1 -genkey -noout -out server.key
openssl req -new -key server.key -subj "/CN=$1" -out server.csr
printf 'subjectAltName=%s\nextendedKeyUsage=serverAuth\nbasicConstraints=CA:FALSE\n' "$names" >server.ext
openssl x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 825 -sha384 \
  -extfile server.ext -out server.pem
rm server.csr server.ext

"""`python -m services.verifier`"""

from paceline.service import main
from services.verifier.verifier import body

if __name__ == "__main__":
    main("verifier", body)
